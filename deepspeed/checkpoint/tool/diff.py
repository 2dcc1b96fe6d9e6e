"""``ds_checkpoint diff``: two checkpoints, or a checkpoint and a model file, tensor by tensor."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from deepspeed.checkpoint.load.compare import TensorRow, compare
from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.save.writer import progress
from deepspeed.checkpoint.tool.common import opened, say
from deepspeed.checkpoint.tool.models import model_file, open_model
from deepspeed.checkpoint.weights.weights import Stream, shared_names, stream, weight_keys


def _everything(source: Source, *, plain: bool) -> dict[str, Stream]:
    """All tensors by state and name; those inside client and RNG state only where both sides keep them as tensors."""
    return {" ".join(k): stream(source, k, name=" ".join(k)) for k in source.entries if plain or k[0] != "plain"}


def rows(source: Source, other: dict[str, Stream], mine: dict[str, Stream]) -> Iterator[TensorRow]:
    """Every tensor of either side; ``mine`` and ``other`` by name. A tied weight may be there once, or by each of its
    names.
    """
    shared = shared_names(source)
    with progress("diff", sum(s.nbytes for s in mine.values())) as told:
        for name, values in mine.items():
            if name in other:
                yield compare(values, other[name])
            elif not any(alias in other for alias, real in shared.items() if real == name):
                yield TensorRow(name, "missing", "only in the first")
            told(values.nbytes)
        for name, values in other.items():
            if name not in mine:
                real = mine.get(shared.get(name, ""))
                row = compare(real, values) if real is not None else TensorRow(name, "extra", "only in the second")
                yield TensorRow(name, row.verdict, row.detail)


def run(path_a: Path, path_b: Path, *, tag: str | None, tag_b: str | None, quiet: bool) -> int:
    """Print a line per tensor; 0 when all are equal, else 1."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(opened(path_a, tag))
        if path_b.is_dir() and model_file(path_b) is None:
            second = stack.enter_context(opened(path_b, tag_b or tag))
            both_own = source.kind == second.kind == "deepspeed-checkpoint"
            mine, other = _everything(source, plain=both_own), _everything(second, plain=both_own)
        else:
            mine = {k[1]: stream(source, k) for k in weight_keys(source)}
            other = open_model(path_b)
        return tell(rows(source, other, mine), "equal", quiet=quiet)


def tell(found: Iterable[TensorRow], well: str, *, quiet: bool) -> int:
    """Print a line per row, of those whose verdict is ``well`` only if not ``quiet``, and the sums; 0 when all are
    ``well``, else 1.
    """
    counts = dict.fromkeys((well, "different", "missing", "extra"), 0)
    for row in found:
        counts[row.verdict] += 1
        if not quiet or row.verdict != well:
            say(f"{row.verdict:<9} {row.name}{f'  ({row.detail})' if row.detail else ''}")
    say(", ".join(f"{number} {word}" for word, number in counts.items()))
    return 1 if sum(counts.values()) > counts[well] else 0
