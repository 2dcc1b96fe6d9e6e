"""Names of the files of a checkpoint: the manifest of this package, and those in DeepSpeed's layout."""

import os
import re

MANIFEST = "manifest.json"
MODEL_FILE_PREFIX = "mp_rank_"
ZERO_FILE_PREFIX = "zero_pp_rank_"
BF16_ZERO_FILE_PREFIX = "bf16_zero_pp_rank_"
OPTIM_FILE_SUFFIX = "_optim_states.pt"
MODEL_FILE_SUFFIX = "_model_states.pt"


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


def natural_order(name: str) -> list[int | str]:
    """Return a sort key that puts rank 10 after rank 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
