"""All ranks or none: what one rank fails at is an error on every rank, so that nobody waits for a rank that has given
up.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from deepspeed.comm import collectives
from deepspeed.errors import CheckpointError
from deepspeed.mesh.groups import Mesh

_Named = TypeVar("_Named", bound=Hashable)


class Shared:
    """``mine``: what this rank tells the others; ``all``: what every rank told, in rank order, once the body has
    ended.
    """

    def __init__(self) -> None:
        self.mine: Any = None
        self.all: list[Any] = []


def gather(mesh: Mesh, value: Any) -> list[Any]:
    """What every rank of the job says, in rank order. Collective."""
    return collectives.gather_objects(value, mesh.talk)


@contextlib.contextmanager
def together(mesh: Mesh, what: str) -> Iterator[Shared]:
    """Every rank of the job runs the body; an error on one is raised on all when all have ended. Collective unless
    interrupted.

    A rank's own CheckpointError is raised as it is, any other as a CheckpointError that names the rank and ``what`` it
    was doing.
    """
    shared, error = Shared(), None
    try:
        yield shared
    except Exception as failure:  # whatever it is, the other ranks wait for the answer
        error = failure
    kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
    said = gather(mesh, (None, shared.mine) if error is None else ((kind, str(error)), None))
    shared.all = [value for _, value in said]
    failed = [(rank, *bad) for rank, (bad, _) in zip(mesh.job.ranks, said, strict=True) if bad is not None]
    if not failed:
        return
    if isinstance(error, CheckpointError):
        raise error
    rank, kind, text = failed[0]
    raise kind(f"{what} failed on rank {rank}: {text}") from error


def first_to_name(said: Iterable[Iterable[_Named]]) -> dict[_Named, int]:
    """The first rank, by its number in the job, that names each thing, of what every rank says it has."""
    found: dict[_Named, int] = {}
    for rank, names in enumerate(said):
        for name in names:
            found.setdefault(name, rank)
    return found


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
