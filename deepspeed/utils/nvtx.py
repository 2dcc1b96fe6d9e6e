from deepspeed.observe.timers import instrument_w_nvtx
