from deepspeed.comm.group_getters import __dir__ as __dir__, __getattr__ as __getattr__, initialize as initialize
