"""Names of the files in DeepSpeed's layout and of the entries in them, for programs that read them by these names."""

import os

OPTIMIZER_STATE_DICT = "optimizer_state_dict"
FP32_GROUPS_KEY, FP32_FLAT_GROUPS = "fp32_groups", "fp32_flat_groups"
BASE_OPTIMIZER_STATE, SINGLE_PARTITION_OF_FP32_GROUPS = "base_optimizer_state", "single_partition_of_fp32_groups"
PARAM_GROUPS, GROUP_PADDINGS, PARTITION_COUNT = "param_groups", "group_paddings", "partition_count"
ZERO_STAGE, CLIP_GRAD, LOSS_SCALER = "zero_stage", "clip_grad", "loss_scaler"
PARAM_SLICE_MAPPINGS, PARAM_SHAPES, BUFFER_NAMES = "param_slice_mappings", "param_shapes", "buffer_names"
FROZEN_PARAM_SHAPES, FROZEN_PARAM_FRAGMENTS = "frozen_param_shapes", "frozen_param_fragments"
DS_VERSION, DS_CONFIG = "ds_version", "ds_config"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
MODEL_FILE_PREFIX, LAYER_FILE_PREFIX = "mp_rank_", "layer_"
ZERO_FILE_PREFIX, OPTIM_FILE_SUFFIX = "zero_pp_rank_", "_optim_states.pt"
BF16_ZERO_FILE_PREFIX, MODEL_FILE_SUFFIX = "bf16_zero_pp_rank_", "_model_states.pt"


def get_model_ckpt_name_for_rank(base_folder: str | os.PathLike[str], mp_rank_str: str) -> str:
    """Return the path of the model-state file of a model-parallel rank ("00")."""
    return os.path.join(base_folder, f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str | os.PathLike[str], dp_rank: int, mp_rank: int) -> str:
    """Return the path of the optimizer-state file of a rank."""
    return os.path.join(base_folder, f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}")


def get_layer_ckpt_name_for_rank(base_folder: str | os.PathLike[str], layer_id: int | str, tp_rank: int) -> str:
    """Return the path of the file of a pipeline layer."""
    number = f"{layer_id:02d}" if isinstance(layer_id, int) else layer_id
    return os.path.join(base_folder, f"layer_{number}-model_{tp_rank:02d}-model_states.pt")
