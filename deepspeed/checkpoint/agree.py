"""All ranks or none: an error on one rank is raised on every rank, so that no rank waits for one that gave up."""

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from deepspeed.comm import collectives
from deepspeed.errors import CheckpointError
from deepspeed.mesh.groups import Mesh

_Named = TypeVar("_Named", bound=Hashable)


@dataclass
class Shared:
    """Values to gather: ``mine`` is set by this rank; ``all`` holds every rank's, in rank order, after the body."""

    mine: Any = None
    all: Sequence[Any] = ()


@contextlib.contextmanager
def together(mesh: Mesh, action: str) -> Iterator[Shared]:
    """Run the body on every rank of the job; raise an error of one on all, with rank and ``action``. Collective."""
    shared, error = Shared(), None
    try:
        yield shared
    except Exception as failure:  # whatever it is, the other ranks wait for the answer
        error = failure
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    local = (None, shared.mine) if error is None else ((kind, str(error)), None)
    bad, shared.all = zip(*collectives.gather_objects(local, mesh.talk), strict=True)
    if isinstance(error, CheckpointError):
        raise error
    for rank, (kind, text) in ((rank, fault) for rank, fault in zip(mesh.job.ranks, bad, strict=True) if fault):
        raise kind(f"{action} failed on {mesh.title(rank)}: {text}") from error


def first_to_name(of_ranks: Iterable[Iterable[_Named]]) -> dict[_Named, int]:
    """Return the first rank, by its number in the job, that names each item."""
    pairs = [(name, rank) for rank, names in enumerate(of_ranks) for name in names]
    return dict(reversed(pairs))


def in_no_model(extra: Sequence[Sequence[_Named]]) -> list[_Named]:
    """Return the names that are extra on every rank of the job; others belong to parameters of other ranks."""
    peers = [set(names) for names in extra[1:]]
    return [name for name in extra[0] if all(name in names for names in peers)]


def through(items: Iterable[tuple[Any, ...]], fn: Callable[..., None]) -> None:
    """Call ``fn`` for every item; raise an error only after the last item, as other ranks take part in each."""
    rest = iter(items)
    try:
        for item in rest:
            fn(*item)
    except Exception:
        deque(rest, maxlen=0)
        raise
