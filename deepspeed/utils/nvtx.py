from deepspeed.monitor.timers import instrument_w_nvtx
