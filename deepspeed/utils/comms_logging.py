from deepspeed.comm.trace import CommsLog as CommsLogger
