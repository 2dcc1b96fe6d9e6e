"""Ranks as a grid of named axes, as users of deepspeed.pipe ask for it."""

import pytest

from deepspeed.comm.mesh.topology import dense_topology
from deepspeed.errors import UsageError
from deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


def test_the_last_axis_varies_fastest() -> None:
    grid = ProcessTopology(["row", "column"], [2, 3])
    assert grid.world_size() == 6 and grid.get_dim("row") == 2 and grid.get_dim("none") == 0
    assert [grid.get_rank(row=r, column=c) for r in range(2) for c in range(3)] == list(range(6))
    assert grid.get_coord(4).row == 1 and grid.get_coord(4).column == 1
    assert grid.get_axis_names() == ["row", "column"]
    assert grid.get_axis_comm_lists("row") == [[0, 3], [1, 4], [2, 5]]
    assert grid.get_axis_comm_lists("column") == [[0, 1, 2], [3, 4, 5]] and grid.get_axis_comm_lists("none") == []
    assert grid.filter_match(column=2) == [2, 5] and grid.get_axis_list("row", 1) == [3, 4, 5]
    with pytest.raises(UsageError, match="no place in a grid"):
        grid.get_rank(row=2, column=0)


def test_names_of_ranks_leave_axes_out() -> None:
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert grid.get_axis_names() == ["pipe", "data", "model"]
    assert grid.get_rank_repr(3) == "model_01"
    assert grid.get_rank_repr(3, omit_axes=["pipe"]) == "data_01-model_01"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""


def test_the_grid_is_that_of_the_mesh() -> None:
    """Otherwise a module would build the layers of another stage than the engine runs."""
    grid, mesh = PipeModelDataParallelTopology(2, 2, 3), dense_topology(tuple(range(12)), pp=2, tp=2)
    for rank in range(12):
        for axis, name in (("pipe", "pp"), ("data", "dp"), ("model", "tp")):
            assert getattr(grid.get_coord(rank), axis) == mesh.axis(rank, name).index


def test_an_mpu_answers_for_one_rank() -> None:
    mpu = PipelineParallelGrid(PipeModelDataParallelTopology(2, 2, 2), rank=5)
    assert (mpu.get_stage_id(), mpu.get_data_parallel_rank(), mpu.get_model_parallel_rank()) == (1, 0, 1)
    assert (mpu.get_pipe_parallel_world_size(), mpu.get_data_parallel_world_size()) == (2, 2)
    assert mpu.get_model_parallel_world_size() == mpu.get_slice_parallel_world_size() == 2
    assert mpu.stage_to_global(0) == 1 and mpu.stage_to_global(0, data=1) == 3
    with pytest.raises(UsageError, match="no process groups before"):
        mpu.get_pipe_parallel_group()
