"""Plain fp32 weights out of a checkpoint of this package or in DeepSpeed's layout, without a process group."""

import argparse
import contextlib
import glob
import logging
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import constants
from deepspeed.checkpoint.foreign.weights import Stream, shared_names, stream, weight_keys, with_aliases, write_weights
from deepspeed.checkpoint.load.reader import find_and_open
from deepspeed.checkpoint.load.source import Source
from deepspeed.monitor.log import logger
from deepspeed.monitor.program import guarded

Folder = str | os.PathLike[str]


class LazyTensor:
    """Weight that is read when ``contiguous`` is called, so that a state dict of them costs no memory."""

    def __init__(self, values: Stream) -> None:
        dtype, shape = values.dtype, torch.Size(values.shape)
        self.dtype, self.shape, self.device = dtype, shape, torch.device("cpu")
        self.contiguous, self.numel, self.element_size = values.whole, shape.numel, lambda: dtype.itemsize
        self.size = lambda: shape


def _existing(folder: Folder) -> Path:
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {os.fspath(folder)}")
    return Path(folder)


def _streams(source: Source, dtype: torch.dtype, *, exclude_frozen: bool) -> list[Stream]:
    """Stream trained weights and narrower floating buffers in ``dtype``; frozen ones too, unless it is fp32."""
    streams = []
    for key in weight_keys(source, exclude_frozen=exclude_frozen):
        stored = source.entries[key].dtype
        whole = {"param": dtype == torch.float32, "buffer": stored.itemsize >= dtype.itemsize}
        as_stored = not stored.is_floating_point or whole.get(key[0], False)
        streams.append(stream(source, key, dtype=None if as_stored else dtype))
    return streams


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 - called so by client code
    lazy_mode: bool = False,  # noqa: FBT001, FBT002
) -> dict[str, Any]:
    """Return the model's state dict on the CPU: trained weights in fp32, also tied names; frozen ones in their dtype.

    ``checkpoint_dir`` holds tags (``tag``, else what ``latest`` names) or is itself one. With ``lazy_mode`` every value
    is a LazyTensor, read by its ``contiguous()``. Raises FileNotFoundError, CheckpointError.
    """
    source = find_and_open(_existing(checkpoint_dir), tag)
    try:
        streams = _streams(source, torch.float32, exclude_frozen=exclude_frozen_parameters)
        state = OrderedDict((s.name, LazyTensor(s) if lazy_mode else s.whole()) for s in streams)
        return with_aliases(state, shared_names(source))
    finally:
        if not lazy_mode:
            source.close()


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,  # noqa: FBT001, FBT002 - called so by client code
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the weights to ``output_dir`` as ``pytorch_model.bin`` or ``model.safetensors``, in shards when larger.

    Holds one shard in memory, or a piece of one tensor with ``safe_serialization`` (where tied names are written once).
    Raises FileNotFoundError, CheckpointError, ValueError for a malformed size, OSError.
    """
    with contextlib.closing(find_and_open(_existing(checkpoint_dir), tag)) as source:
        streams, shared = _streams(source, dtype, exclude_frozen=exclude_frozen_parameters), shared_names(source)
        out, safe = Path(output_dir), safe_serialization
        paths = write_weights(streams, out, safetensors=safe, max_shard_size=max_shard_size, shared=shared)
    logger.info("wrote %s", ", ".join(map(str, paths)))


convert_zero_checkpoint_to_state_dict = convert_zero_checkpoint_to_fp32_state_dict


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: Folder, tag: str | None = None
) -> torch.nn.Module:
    """Move ``model`` to the CPU, give it the checkpoint's weights, and return it; an engine of it is of no more use.

    Sharded parameters become plain ones in their own dtype. Weights of the model that the checkpoint does not have keep
    their values, with a warning. Raises as the functions above.
    """
    state: Mapping[str, Any] = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    plain: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # of those that have a part on every rank; tied ones once
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if name not in state or not hasattr(param, "ds_id"):
            continue
        if param not in plain:
            values = torch.empty(param.shape, dtype=param.dtype, device="cpu")
            plain[param] = torch.nn.Parameter(values, requires_grad=param.requires_grad)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, plain[param])
    incompatible = model.load_state_dict(state, strict=False)
    if incompatible.missing_keys or incompatible.unexpected_keys:
        text = "%s: not in the checkpoint: %s; not in the model: %s"
        logger.warning(text, checkpoint_dir, incompatible.missing_keys, incompatible.unexpected_keys)
    return model


def get_model_state_file(checkpoint_dir: Folder, zero_stage: int) -> str:
    """Return the first rank's model-state file in a tag's folder. Raises FileNotFoundError."""
    rank = f"{constants.ZERO_FILE_PREFIX}0_" if zero_stage > 2 else ""
    path = _existing(checkpoint_dir) / f"{rank}{constants.MODEL_FILE_PREFIX}00{constants.MODEL_FILE_SUFFIX}"
    if not path.exists():
        raise FileNotFoundError(f"there is no model-state file {path}")
    return str(path)


def get_checkpoint_files(checkpoint_dir: Folder, glob_pattern: str) -> list[str]:
    """Return the files of a tag's folder that match, by rank. Raises FileNotFoundError when there is none."""
    paths = glob.glob(os.path.join(glob.escape(os.fspath(checkpoint_dir)), glob_pattern))
    if not paths:
        raise FileNotFoundError(f"there is no file {glob_pattern} in {os.fspath(checkpoint_dir)}")
    # rank 10 comes after rank 9
    return sorted(paths, key=lambda path: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", path)])


def get_optim_files(checkpoint_dir: Folder) -> list[str]:
    """Return the optimizer-state files of a tag's folder, by rank. Raises FileNotFoundError when there is none."""
    return get_checkpoint_files(checkpoint_dir, f"*{constants.OPTIM_FILE_SUFFIX}")


def get_model_state_files(checkpoint_dir: Folder) -> list[str]:
    """Return the model-state files of a tag's folder, by rank. Raises FileNotFoundError when there is none."""
    return get_checkpoint_files(checkpoint_dir, f"*{constants.MODEL_FILE_SUFFIX}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program ``zero_to_fp32.py``; return 0, or 2 with one sentence on standard error."""
    text = "Write the weights of a checkpoint as one fp32 state dict."
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description=text)
    parser.add_argument("checkpoint_dir", help="the folder that holds 'latest', or a tag's folder")
    parser.add_argument("output_dir", help="where pytorch_model.bin or model.safetensors goes")
    parser.add_argument("--max_shard_size", default="5GB", help="most bytes of one file, such as 5GB (default)")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors; tied names are written once")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint (default: what 'latest' names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen weights out")
    parser.add_argument("-d", "--debug", action="store_true", help="say more, and where an error comes from")
    options = vars(parser.parse_args(argv))
    debug = options.pop("debug")

    def run() -> int:
        convert_zero_checkpoint_to_fp32_state_dict(**options)
        return 0

    if debug:
        logger.setLevel(logging.DEBUG)
        return run()
    return guarded("zero_to_fp32.py", run)


if __name__ == "__main__":
    sys.exit(main())
