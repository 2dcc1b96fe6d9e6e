"""``ds_checkpoint diff``: two checkpoints, or a checkpoint and a model file of another program, tensor by tensor."""

import contextlib
import json
import pickle
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from deepspeed.checkpoint.foreign.weights import Stream, shared_names, stream, total_bytes, weight_keys
from deepspeed.checkpoint.load.compare import TensorRow, compare_tensors, in_memory
from deepspeed.checkpoint.load.reader import find_and_open
from deepspeed.checkpoint.save.writer import progress
from deepspeed.errors import CheckpointError, UsageError
from deepspeed.monitor.program import say

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MODELS = (*_INDEXES, "model.safetensors", "pytorch_model.bin")


def run(args: Namespace) -> int:
    """Print a line per tensor; return 0 when all are equal, else 1."""
    other = Path(args.other)
    if args.checkpoint == "live":
        from deepspeed.tools.checkpoint import live  # noqa: PLC0415 - the only command that needs the whole package

        return tell(live.rows(args), "equal" if args.values else "fits", quiet=args.quiet)
    if args.model or args.config or args.values:
        raise UsageError("--model, --config and --values belong to: ds_checkpoint diff live CKPT")
    if not other.exists():
        raise CheckpointError(f"there is no {other}")
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(find_and_open(Path(args.checkpoint), args.tag)))
        if other.is_dir() and not any((other / name).is_file() for name in _MODELS):
            second = stack.enter_context(contextlib.closing(find_and_open(other, args.tag_b or args.tag)))
            # those inside client and RNG state only where both sides keep them as tensors
            plain = source.kind == second.kind == "deepspeed-checkpoint"
            first, streams = (
                {" ".join(k): stream(side, k, name=" ".join(k)) for k in side.entries if plain or k[0] != "plain"}
                for side in (source, second)
            )
        else:
            first, streams = {k[1]: stream(source, k) for k in weight_keys(source)}, _model(other)
        return tell(_rows(first, streams, shared_names(source)), "equal", quiet=args.quiet)


def _rows(first: dict[str, Stream], second: dict[str, Stream], shared: dict[str, str]) -> Iterator[TensorRow]:
    """Yield a row for every tensor of either side. A tied weight may be stored once, or by each of its names."""
    with progress("diff", total_bytes(first.values())) as advance:
        for name, values in first.items():
            if name in second:
                yield compare_tensors(values, second[name])
            elif not any(alias in second for alias, real in shared.items() if real == name):
                yield TensorRow(name, "missing", "only in the first")
            advance(values.nbytes)
        for name, values in second.items():
            if name not in first:
                real = first.get(shared.get(name, ""))
                row = TensorRow(name, "extra", "only in the second") if real is None else compare_tensors(real, values)
                yield TensorRow(name, row.verdict, row.detail)


def tell(rows: Iterable[TensorRow], well: str, *, quiet: bool) -> int:
    """Print the rows (``quiet``: only those not ``well``) and the sums; return 0 when all are ``well``, else 1."""
    counts = dict.fromkeys((well, "different", "missing", "extra"), 0)
    for row in rows:
        counts[row.verdict] += 1
        if not quiet or row.verdict != well:
            say(f"{row.verdict:<9} {row.name}{f'  ({row.detail})' if row.detail else ''}")
    say(", ".join(f"{number} {word}" for word, number in counts.items()))
    return 1 if sum(counts.values()) > counts[well] else 0


def _model(path: Path) -> dict[str, Stream]:
    """Return the tensors of a model file or a Hugging Face folder; pickled files are opened with weights_only."""
    first = path if path.is_file() else next(path / name for name in _MODELS if (path / name).is_file())
    if not first.name.endswith(".index.json"):
        return _file(first)
    try:
        where = json.loads(first.read_text(encoding="utf-8"))["weight_map"]
        shards = [first.with_name(name) for name in sorted(set(where.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # with_name takes only a file beside it
        raise CheckpointError(f"{first} is no index of shards: {type(error).__name__}: {error}") from error
    tensors = {name: values for shard in shards for name, values in _file(shard).items()}
    if missing := sorted(set(where) - set(tensors)):
        raise CheckpointError(f"{first} promises {missing[0]} and {len(missing) - 1} more that its shards do not have")
    return tensors


def _file(path: Path) -> dict[str, Stream]:
    """Map a file to memory and return its tensors, which are read where they are used."""
    try:
        if path.suffix == ".safetensors":
            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
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
