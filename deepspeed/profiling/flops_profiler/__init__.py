from deepspeed.profiling.flops_profiler.profiler import (
    FlopsProfiler as FlopsProfiler,
    get_model_profile as get_model_profile,
)
