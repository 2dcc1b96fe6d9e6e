"""Process groups of every sequence-parallel degree over the same ranks, and the one of the current micro-batch."""

from typing import Any

from deepspeed.comm import is_initialized
from deepspeed.comm.collectives import AxisGroup, gather_objects
from deepspeed.comm.mesh.groups import group_over, plain_mesh
from deepspeed.errors import DeepSpeedConfigError


class DegreeGroups:
    """Groups of 1, 2, 4, ... neighbouring ranks. ``current`` is that of the micro-batch at hand, for its attention.

    They are made once, by all ranks, in one order. Ranks that fill no group of a degree have none of it.
    """

    def __init__(self, max_degree: int, *, backend: str = "") -> None:
        job = plain_mesh(backend).job
        alone = AxisGroup(None, 1, 0, (job.ranks[job.index],), "none")
        self._groups = {1: alone}
        self.current = alone
        degree = 2
        while degree <= min(max_degree, job.size):
            first = job.index // degree * degree
            ranks = job.ranks[first : first + degree]
            if len(ranks) == degree:
                assert job.pg is not None
                pg = job.pg if degree == job.size else group_over(job.pg, ranks)
                self._groups[degree] = plain_mesh(backend, group=pg).job
            degree *= 2

    def use(self, degree: int) -> None:
        """Let ``current`` be this rank's group of ``degree`` ranks, until the next call."""
        self.current = self._groups[degree]


def agree(facts: dict[str, Any], otherwise: str) -> None:
    """Raise DeepSpeedConfigError on every rank, beginning with ``otherwise``, unless all have equal ``facts``."""
    if not is_initialized():
        return
    everyone = gather_objects(facts, plain_mesh("").job)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise DeepSpeedConfigError(
                    f"{otherwise}: {name} is {everyone[0][name]} on rank 0 and {value} on rank {rank}; give every rank "
                    "the same dataset, arguments and position"
                )
