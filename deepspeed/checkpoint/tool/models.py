"""Model files of other programs as streams: safetensors, torch state dicts, and Hugging Face folders with an index."""

import json
import pickle
from pathlib import Path

import torch

from deepspeed.checkpoint.load.compare import in_memory
from deepspeed.checkpoint.weights.safetensors_file import read_safetensors
from deepspeed.checkpoint.weights.weights import Stream
from deepspeed.errors import CheckpointError

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")


def model_file(path: Path) -> Path | None:
    """The file that begins the model at ``path``; None when there is no model file."""
    if path.is_file():
        return path
    return next((path / name for name in (*_INDEXES, *_SINGLE) if (path / name).is_file()), None)


def open_model(path: Path) -> dict[str, Stream]:
    """The tensors of a model file or folder, by name. Pickled files are opened with weights_only. Raises
    CheckpointError.
    """
    first = model_file(path)
    if first is None:
        raise CheckpointError(f"{path} is neither a checkpoint nor a model: no {', no '.join((*_INDEXES, *_SINGLE))}")
    if not first.name.endswith(".index.json"):
        return _file(first)
    try:
        where = json.loads(first.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in where.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{first} is no index of shards: {type(error).__name__}: {error}") from error
    found: dict[str, Stream] = {}
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{first} names {name!r}, which is not a file beside it")
        found |= _file(first.with_name(name))
    missing = sorted(set(where) - set(found))
    if missing:
        raise CheckpointError(
            f"{first} promises {missing[0]} and {len(missing) - 1} more tensors that its shards do not have"
        )
    return found


def _file(path: Path) -> dict[str, Stream]:
    try:
        return read_safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _torch_file(path: Path) -> dict[str, Stream]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{path} cannot be opened as a state dict with weights_only=True: {reason}") from error
    for wrapper in ("state_dict", "model", "module"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)} if isinstance(state, dict) else {}
    if not tensors:
        raise CheckpointError(f"{path} holds no state dict of tensors")
    return {str(name): in_memory(str(name), value) for name, value in tensors.items()}
