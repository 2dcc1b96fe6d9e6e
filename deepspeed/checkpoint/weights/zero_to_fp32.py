"""Plain fp32 weights out of a checkpoint of this package or in DeepSpeed's layout, without a process group."""

import argparse
import glob
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.format.names import (
    MODEL_FILE_PREFIX,
    MODEL_FILE_SUFFIX,
    OPTIM_FILE_SUFFIX,
    ZERO_FILE_PREFIX,
    natural_order,
)
from deepspeed.checkpoint.load.reader import find_and_open
from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.weights.weight_files import SAFETENSORS, TORCH, write_weights
from deepspeed.checkpoint.weights.weights import Stream, shared_names, stream, weight_keys
from deepspeed.config.model.values import byte_count
from deepspeed.errors import CheckpointError
from deepspeed.observe.log import logger

Folder = str | os.PathLike[str]


class LazyTensor:
    """A weight that is read when ``contiguous`` is called, so that a state dict of them costs no memory."""

    def __init__(self, source: Source, values: Stream) -> None:
        self._source = source  # keeps the files open
        self._values = values
        self.dtype = values.dtype
        self.shape = torch.Size(values.shape)
        self.device = torch.device("cpu")

    def contiguous(self) -> torch.Tensor:
        """The values, in new memory each time."""
        return self._values.whole()

    def numel(self) -> int:
        """Elements."""
        return self._values.numel

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def size(self) -> torch.Size:
        """The shape."""
        return self.shape

    def __repr__(self) -> str:
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def _open(checkpoint_dir: Folder, tag: str | None) -> Source:
    path = Path(checkpoint_dir)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    return find_and_open(path, tag)


def _streams(source: Source, dtype: torch.dtype, *, exclude_frozen: bool) -> list[Stream]:
    """Trained weights in ``dtype``, narrower floating buffers too; frozen weights as stored unless another dtype than
    fp32 is wanted.
    """
    found = []
    for key in weight_keys(source, exclude_frozen=exclude_frozen):
        stored = source.entries[key].dtype
        whole = {"param": dtype == torch.float32, "buffer": stored.itemsize >= dtype.itemsize}
        as_stored = not stored.is_floating_point or whole.get(key[0], False)
        found.append(stream(source, key, dtype=None if as_stored else dtype))
    return found


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 - called so by client code
    lazy_mode: bool = False,  # noqa: FBT001, FBT002
) -> dict[str, Any]:
    """The model's state dict on the CPU: trained weights in fp32, tied names included; frozen weights in their own
    dtype.

    ``checkpoint_dir`` holds tags (``tag``, else what ``latest`` names) or is itself one. With ``lazy_mode`` every value
    is a LazyTensor, read by its ``contiguous()``. Raises FileNotFoundError, CheckpointError.
    """
    source = _open(checkpoint_dir, tag)
    state: dict[str, Any] = OrderedDict()
    try:
        for values in _streams(source, torch.float32, exclude_frozen=exclude_frozen_parameters):
            state[values.name] = LazyTensor(source, values) if lazy_mode else values.whole()
        state.update({alias: state[name] for alias, name in shared_names(source).items() if name in state})
    finally:
        if not lazy_mode:
            source.close()
    return state


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,  # noqa: FBT001, FBT002 - called so by client code
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the weights to ``output_dir`` as ``pytorch_model.bin`` or ``model.safetensors``, in shards with an index
    when larger.

    Holds one shard in memory, or a piece of one tensor with ``safe_serialization`` (where tied names are written once).
    Raises FileNotFoundError, CheckpointError, ValueError for a malformed size, OSError.
    """
    try:
        limit = None if max_shard_size is None else byte_count(max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size {error}") from None
    source = _open(checkpoint_dir, tag)
    try:
        streams = _streams(source, dtype, exclude_frozen=exclude_frozen_parameters)
        kind = SAFETENSORS if safe_serialization else TORCH
        written = write_weights(streams, Path(output_dir), kind, max_shard_bytes=limit, shared=shared_names(source))
    finally:
        source.close()
    logger.info("wrote %s", ", ".join(str(path) for path in written))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,  # noqa: FBT001, FBT002 - called so by client code
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002
) -> None:
    """``convert_zero_checkpoint_to_state_dict`` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: Folder, tag: str | None = None
) -> torch.nn.Module:
    """Move ``model`` to the CPU, give it the checkpoint's weights, and return it; an engine round it must not be used
    afterwards.

    Sharded parameters become plain ones in their own dtype. Weights of the model that the checkpoint does not have keep
    their values, with a warning. Raises as the functions above.
    """
    state: Mapping[str, Any] = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    _unshard(model, state)
    left = model.load_state_dict(state, strict=False)
    if left.missing_keys or left.unexpected_keys:
        logger.warning(
            "%s: not in the checkpoint: %s; not in the model: %s",
            checkpoint_dir,
            left.missing_keys,
            left.unexpected_keys,
        )
    return model


def _unshard(model: torch.nn.Module, names: Collection[str]) -> None:
    """Memory of their own for parameters that have a part on every rank; tied ones stay tied."""
    plain: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if name not in names or not hasattr(param, "ds_id"):
            continue
        if param not in plain:
            values = torch.empty(param.shape, dtype=param.dtype)
            plain[param] = torch.nn.Parameter(values, requires_grad=param.requires_grad)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, plain[param])


def get_model_state_file(checkpoint_dir: Folder, zero_stage: int) -> str:
    """The first rank's model-state file in a tag's folder. Raises FileNotFoundError."""
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"there is no folder {os.fspath(checkpoint_dir)}")
    rank = f"{ZERO_FILE_PREFIX}0_" if zero_stage > 2 else ""
    path = os.path.join(checkpoint_dir, f"{rank}{MODEL_FILE_PREFIX}00{MODEL_FILE_SUFFIX}")
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no model-state file {path}")
    return path


def get_checkpoint_files(checkpoint_dir: Folder, glob_pattern: str) -> list[str]:
    """Files of a tag's folder that match, by rank. Raises FileNotFoundError when there is none."""
    found = sorted(glob.glob(os.path.join(glob.escape(os.fspath(checkpoint_dir)), glob_pattern)), key=natural_order)
    if not found:
        raise FileNotFoundError(f"there is no file {glob_pattern} in {os.fspath(checkpoint_dir)}")
    return found


def get_optim_files(checkpoint_dir: Folder) -> list[str]:
    """The optimizer-state files of a tag's folder, by rank. Raises FileNotFoundError when there is none."""
    return get_checkpoint_files(checkpoint_dir, f"*{OPTIM_FILE_SUFFIX}")


def get_model_state_files(checkpoint_dir: Folder) -> list[str]:
    """The model-state files of a tag's folder, by rank. Raises FileNotFoundError when there is none."""
    return get_checkpoint_files(checkpoint_dir, f"*{MODEL_FILE_SUFFIX}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Write the weights of a checkpoint as one fp32 state dict."
    )
    parser.add_argument("checkpoint_dir", help="the folder that holds 'latest', or a tag's folder")
    parser.add_argument("output_dir", help="where pytorch_model.bin or model.safetensors goes")
    parser.add_argument("--max_shard_size", default="5GB", help="most bytes of one file, such as 5GB (default)")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors; tied names are written once")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint (default: what 'latest' names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen weights out")
    parser.add_argument("-d", "--debug", action="store_true", help="say more")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The program ``zero_to_fp32.py``; exit status 0, or 1 with one sentence on standard error."""
    args = _parser().parse_args(argv)
    if args.debug:
        logger.setLevel(logging.DEBUG)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            args.checkpoint_dir,
            args.output_dir,
            args.max_shard_size,
            args.safe_serialization,
            args.tag,
            args.exclude_frozen_parameters,
        )
    except (CheckpointError, ValueError, OSError) as error:
        if args.debug:
            raise
        sys.stderr.write(f"zero_to_fp32.py: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
