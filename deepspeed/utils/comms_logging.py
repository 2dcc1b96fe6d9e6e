from deepspeed.client.comm.comms_log import CommsLog as CommsLogger
