"""Import path of activation checkpointing."""

from deepspeed.activation.checkpointing import (
    _CUDA_RNG_STATE_TRACKER as _CUDA_RNG_STATE_TRACKER,
    _MODEL_PARALLEL_RNG_TRACKER_NAME as _MODEL_PARALLEL_RNG_TRACKER_NAME,
    _set_cuda_rng_state as _set_cuda_rng_state,
    checkpoint as checkpoint,
    configure as configure,
    get_cuda_rng_tracker as get_cuda_rng_tracker,
    is_configured as is_configured,
    model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed as model_parallel_reconfigure_tp_seed,
    non_reentrant_checkpoint as non_reentrant_checkpoint,
    partition_activations_in_checkpoint as partition_activations_in_checkpoint,
    reset as reset,
    set_num_layers as set_num_layers,
)
