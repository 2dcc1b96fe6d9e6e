from deepspeed.client.comm.log import CommsLog as CommsLogger
