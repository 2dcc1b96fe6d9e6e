"""Ranks as a grid of named axes, and who answers for which of them, under the names of deepspeed.pipe."""

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from deepspeed.client.attrs import answers
from deepspeed.comm.mesh.groups import group_over, plain_mesh
from deepspeed.errors import UsageError


class ProcessTopology:
    """Grid of ``axes`` with sizes ``dims``, row-major: ranks that differ on the last axis only are neighbours."""

    world_size = answers(lambda self: len(self.mapping), "Number of ranks.")
    get_axis_names = answers("axes", "The axes, outermost first.")

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or min(dims, default=0) < 1:
            raise UsageError(f"axes {list(axes)} and sizes {list(dims)} do not describe a grid")
        self.axes, self.dims = list(axes), list(dims)
        # A coordinate reads as ``coord.pipe``, ``coord.data``.
        coord: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
        places = product(*(range(size) for size in dims))
        self.ProcessCoord = coord
        self.mapping: dict[Any, int] = {coord(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coords: int) -> int:
        """Return the rank at ``coords``; raise UsageError unless these name every axis and a place in the grid."""
        try:
            return self.mapping[self.ProcessCoord(**coords)]
        except (KeyError, TypeError):
            raise UsageError(
                f"{coords} is no place in a grid of {dict(zip(self.axes, self.dims, strict=True))}"
            ) from None

    def get_coord(self, rank: int) -> Any:
        """Return the place of ``rank``, a tuple with the axes' names."""
        for place, other in self.mapping.items():
            if other == rank:
                return place
        raise UsageError(f"rank {rank} is not in a grid of {self.world_size()} ranks")

    def get_dim(self, axis: str) -> int:
        """Return the size of ``axis``; 0 if there is none of that name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a text for file names, such as ``model_00``, with the axes that are not omitted."""
        place = self.get_coord(rank)._asdict()
        return outer_sep.join(f"{axis}{inner_sep}{way:02d}" for axis, way in place.items() if axis not in omit_axes)

    def filter_match(self, **coords: int) -> list[int]:
        """Return the ranks whose place agrees with ``coords``, ascending."""
        wanted = coords.items()
        return [rank for place, rank in self.mapping.items() if all(getattr(place, a) == way for a, way in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at position ``idx`` of ``axis``, ascending."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ on ``axis`` only; empty if there is no such axis."""
        if axis not in self.axes:
            return []
        other_axes = [other for other in self.axes if other != axis]
        places = product(*(range(self.get_dim(other)) for other in other_axes))
        return [self.filter_match(**dict(zip(other_axes, place, strict=True))) for place in places]

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages, each of ``num_dp`` data-parallel ranks that are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages x data-parallel x tensor-parallel ranks, of which the last are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """Answer Megatron-style calls of an ``mpu``, for one rank of a topology with the axes pipe, data and model.

    By default it is this rank's, of one stage of data-parallel ranks. Process groups are those of ``process_group`` (by
    default of the world), or of the ``mesh`` of an engine; made by their ranks alone, when these first ask.
    """

    def __init__(
        self, topology: ProcessTopology | None = None, process_group: Any = None, *, rank: int | None = None,
        mesh: Any = None,
    ) -> None:  # fmt: skip
        self._job, self._mesh = plain_mesh("gloo", group=process_group).job, mesh
        self._topo = topology = topology or PipeDataParallelTopology(1, self._job.size)
        self.global_rank = self._job.index if rank is None else rank
        self.world_size = topology.world_size()
        self.pipe_parallel_size = max(1, topology.get_dim("pipe"))
        self._sharers = 1 if mesh is None else mesh.sp.size  # of one sequence, neighbours on the axis of data
        self.data_parallel_size = max(1, topology.get_dim("data")) // self._sharers
        self.model_parallel_size = self.slice_parallel_size = max(1, topology.get_dim("model"))

    def _place(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def _group(self, axis: str, name: str) -> Any:
        if self._mesh is not None:
            return getattr(self._mesh, name).pg
        if self._job.pg is None or self._job.size < self.world_size:
            problem = f"this grid of {self.world_size} ranks has no process groups before deepspeed.init_distributed()"
            raise UsageError(f"{problem} by as many; there are {self._job.size}")
        coords = {a: way for a, way in self._topo.get_coord(self.global_rank)._asdict().items() if a != axis}
        ranks = self._topo.filter_match(**coords) if axis in self._topo.axes else [self.global_rank]
        return group_over(self._job.pg, tuple(self._job.ranks[rank] for rank in ranks))

    topology = answers("_topo", "The grid of all ranks.")
    get_global_rank = answers("global_rank")
    get_stage_id = get_pipe_parallel_rank = answers(lambda self: self._place("pipe"), "Pipeline stage of this rank.")
    get_data_parallel_id = get_data_parallel_rank = answers(lambda self: self._place("data") // self._sharers)
    get_model_parallel_rank = get_slice_parallel_rank = answers(lambda self: self._place("model"))
    get_pipe_parallel_world_size = answers("pipe_parallel_size")
    get_data_parallel_world_size = answers("data_parallel_size")
    get_model_parallel_world_size = get_slice_parallel_world_size = answers("model_parallel_size")
    get_pipe_parallel_group = answers(lambda self: self._group("pipe", "pp"))
    get_data_parallel_group = answers(lambda self: self._group("data", "data"))
    get_model_parallel_group = get_slice_parallel_group = answers(lambda self: self._group("model", "tp"))

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of another stage at this rank's place on the other axes; ``kwargs`` changes some of these."""
        place = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**(place | kwargs | {"pipe": stage_id}))
