from deepspeed.client.comm.groups import __dir__ as __dir__, __getattr__ as __getattr__, initialize as initialize
