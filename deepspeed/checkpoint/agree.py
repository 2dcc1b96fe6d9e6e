"""All ranks or none: what one rank fails at is an error on every rank, so that nobody waits for one that gave up."""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from deepspeed.comm import collectives
from deepspeed.errors import CheckpointError
from deepspeed.mesh.groups import Mesh

_Named = TypeVar("_Named", bound=Hashable)


class Shared:
    """``mine``: what this rank tells the others; ``all``: what every rank told, in rank order, after the body."""

    def __init__(self) -> None:
        self.mine: Any = None
        self.all: list[Any] = []


def gather(mesh: Mesh, value: Any) -> list[Any]:
    """What every rank of the job says, in rank order. Collective."""
    return collectives.gather_objects(value, mesh.talk)


@contextlib.contextmanager
def together(mesh: Mesh, what: str) -> Iterator[Shared]:
    """Every rank of the job runs the body; an error on one is raised on all. Collective unless interrupted.

    A rank's CheckpointError is raised there as it is, other errors as a CheckpointError that names rank and ``what``.
    """
    shared, error = Shared(), None
    try:
        yield shared
    except Exception as failure:  # whatever it is, the other ranks wait for the answer
        error = failure
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    answers = gather(mesh, (None, shared.mine) if error is None else ((kind, str(error)), None))
    shared.all = [value for _, value in answers]
    failed = [(rank, *bad) for rank, (bad, _) in zip(mesh.job.ranks, answers, strict=True) if bad is not None]
    if not failed:
        return
    if isinstance(error, CheckpointError):
        raise error
    rank, kind, text = failed[0]
    raise kind(f"{what} failed on rank {rank}: {text}") from error


def first_to_name(of_ranks: Iterable[Iterable[_Named]]) -> dict[_Named, int]:
    """The first rank, by its number in the job, that names each thing."""
    pairs = [(name, rank) for rank, names in enumerate(of_ranks) for name in names]
    return dict(reversed(pairs))


def in_no_model(extra: Sequence[Sequence[_Named]]) -> list[_Named]:
    """What every rank of the job found to be more than it holds: the rest belongs to parameters of other ranks."""
    others = [set(names) for names in extra[1:]]
    return [name for name in extra[0] if all(name in names for names in others)]


def through(items: Iterable[tuple[Any, ...]], each: Callable[..., None]) -> None:
    """Call ``each`` for every item; an error is raised after the last one, as other ranks take part in making them."""
    error: Exception | None = None
    for item in items:
        try:
            if error is None:
                each(*item)
        except Exception as failure:
            error = failure
    if error is not None:
        raise error
