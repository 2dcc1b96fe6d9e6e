"""``ds_checkpoint diff``: two checkpoints, or a checkpoint and a model file of another program, tensor by tensor."""

import contextlib
import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deepspeed.checkpoint.load.compare import TensorRow, compare, in_memory
from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.save.writer import progress
from deepspeed.checkpoint.tool.common import opened, say
from deepspeed.checkpoint.weights.weights import Stream, shared_names, stream, total_bytes, weight_keys
from deepspeed.errors import CheckpointError

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MODELS = (*_INDEXES, "model.safetensors", "pytorch_model.bin")


def _everything(source: Source, *, plain: bool) -> dict[str, Stream]:
    """All tensors by state and name; those inside client and RNG state only where both sides keep them as tensors."""
    return {" ".join(k): stream(source, k, name=" ".join(k)) for k in source.entries if plain or k[0] != "plain"}


def _rows(source: Source, other: dict[str, Stream], mine: dict[str, Stream]) -> Iterator[TensorRow]:
    """Every tensor of either side. A tied weight may be there once, or by each of its names."""
    shared = shared_names(source)
    with progress("diff", total_bytes(mine.values())) as advance:
        for name, values in mine.items():
            if name in other:
                yield compare(values, other[name])
            elif not any(alias in other for alias, real in shared.items() if real == name):
                yield TensorRow(name, "missing", "only in the first")
            advance(values.nbytes)
        for name, values in other.items():
            if name not in mine:
                real = mine.get(shared.get(name, ""))
                row = compare(real, values) if real is not None else TensorRow(name, "extra", "only in the second")
                yield TensorRow(name, row.verdict, row.detail)


def run(path_a: Path, path_b: Path, *, tag: str | None, tag_b: str | None, quiet: bool) -> int:
    """Print a line per tensor; 0 when all are equal, else 1."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(opened(path_a, tag))
        if path_b.is_dir() and not any((path_b / name).is_file() for name in _MODELS):
            second = stack.enter_context(opened(path_b, tag_b or tag))
            plain = source.kind == second.kind == "deepspeed-checkpoint"
            mine, other = _everything(source, plain=plain), _everything(second, plain=plain)
        else:
            mine = {k[1]: stream(source, k) for k in weight_keys(source)}
            other = _model(path_b)
        return tell(_rows(source, other, mine), "equal", quiet=quiet)


def tell(rows: Iterable[TensorRow], well: str, *, quiet: bool) -> int:
    """Print the rows, if ``quiet`` only those that are not ``well``, and the sums; 0 when all are ``well``, else 1."""
    counts = dict.fromkeys((well, "different", "missing", "extra"), 0)
    for row in rows:
        counts[row.verdict] += 1
        if not quiet or row.verdict != well:
            say(f"{row.verdict:<9} {row.name}{f'  ({row.detail})' if row.detail else ''}")
    say(", ".join(f"{number} {word}" for word, number in counts.items()))
    return 1 if sum(counts.values()) > counts[well] else 0


def _model(path: Path) -> dict[str, Stream]:
    """The tensors of a model file, or of a Hugging Face folder; pickled ones are opened with weights_only."""
    first = path if path.is_file() else next(path / name for name in _MODELS if (path / name).is_file())
    if not first.name.endswith(".index.json"):
        return _file(first)
    try:
        where = json.loads(first.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({str(name) for name in where.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{first} is no index of shards: {type(error).__name__}: {error}") from error
    tensors: dict[str, Stream] = {}
    for name in shards:
        if Path(name).name != name:
            raise CheckpointError(f"{first} names {name!r}, which is not a file beside it")
        tensors |= _file(first.with_name(name))
    if missing := sorted(set(where) - set(tensors)):
        raise CheckpointError(f"{first} promises {missing[0]} and {len(missing) - 1} more that its shards do not have")
    return tensors


def _file(path: Path) -> dict[str, Stream]:
    """Memory that is mapped to the file, which is read where the tensors are."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                return {name: in_memory(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - no mapping
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"{path} cannot be opened as a state dict with weights_only=True: {reason}") from error
    for wrapper in ("state_dict", "model", "module"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    tensors = {str(k): v for k, v in state.items() if isinstance(v, torch.Tensor)} if isinstance(state, dict) else {}
    if not tensors:
        raise CheckpointError(f"{path} holds no state dict of tensors")
    return {name: in_memory(name, value) for name, value in tensors.items()}
