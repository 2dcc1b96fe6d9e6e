"""Ranks that hold different parts of a model save one checkpoint: whole tensors for every reader, and any other cut
loads it.
"""

import functools
import json
import re
import tarfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from deepspeed.checkpoint import diff_live
from deepspeed.checkpoint.foreign.weights import weight_streams
from deepspeed.checkpoint.load.compare import Comparison
from deepspeed.checkpoint.load.reader import OwnSource
from deepspeed.checkpoint.load.restore import _fillings, client_state
from deepspeed.checkpoint.load.source import whole
from deepspeed.client.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.errors import CheckpointError
from deepspeed.tools.checkpoint.cli import main as tool
from deepspeed.tools.checkpoint.verify import verify
from deepspeed.zero.layout import Granularity, Segment
from deepspeed.zero.regions import Region
from tests.dist.parallel_parts import LAYOUTS, SHAPES, rank_of, value, world_of
from tests.dist.test_checkpoint_formats import reader
from tests.harness.pool import RankPool
from tests.harness.training import outcome

CUT = ["rows x 2", "columns x 2", "rows", "stages x 2", "stages x columns"]
SAVED_BY_EARLIER_RELEASE = Path(__file__).parents[1] / "data" / "checkpoint_of_1.0.0a1.tar.xz"


SavedIn = Callable[..., Path]  # the folder of a layout's checkpoint, made once; with whole tensors for the optimizer


def granularity(whole_tensors: bool) -> Granularity:  # noqa: FBT001
    return Granularity.PARAMETER if whole_tensors else Granularity.ELEMENT


def save(layout: str, folder: str, whole_tensors: bool = False) -> None:  # noqa: FBT001, FBT002
    with rank_of(LAYOUTS[layout], granularity(whole_tensors)) as rank:
        rank.fill()
        rank.save(folder)


def load(layouts: list[str], folder: str, window: int, whole_tensors: bool = False) -> list[list[str]]:  # noqa: FBT001, FBT002
    """Load under each of the layouts; what is wrong then."""
    found = []
    for layout in layouts:
        with rank_of(LAYOUTS[layout], granularity(whole_tensors)) as rank:
            rank.load(folder, window=True)
            found.append(rank.wrong(window=window))
    return found


def pool_of(request: pytest.FixtureRequest, world: int) -> RankPool:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    return pool


def loads_everywhere(request: pytest.FixtureRequest, folder: Path, window: int, worlds: tuple[int, ...]) -> None:
    """Assert that every layout of so many ranks gets its part of every state."""
    for world in worlds:
        layouts = [name for name in LAYOUTS if world_of(name) == world]
        for rank in pool_of(request, world).run(load, layouts, str(folder), window):
            assert rank == [[] for _ in layouts], dict(zip(layouts, rank, strict=True))


@pytest.fixture(scope="module")
def saved_in(pool2: RankPool, pool3: RankPool, pool4: RankPool, tmp_path_factory: pytest.TempPathFactory) -> SavedIn:
    pools = {2: pool2, 3: pool3, 4: pool4}

    @functools.cache
    def once(layout: str, whole_tensors: bool = False) -> Path:  # noqa: FBT001, FBT002
        folder = tmp_path_factory.mktemp("saved")
        pools[world_of(layout)].run(save, layout, str(folder), whole_tensors)
        return folder

    return once


# -- reading without ranks ------------------------------------------------------------


@pytest.mark.parametrize("layout", CUT)
def test_a_checkpoint_of_parts_is_one_of_whole_tensors(saved_in: SavedIn, layout: str) -> None:
    folder = saved_in(layout) / "t"
    assert verify(folder) == []
    assert sorted(p.name for p in folder.glob("rank_*")) == [f"rank_{r:05d}.bin" for r in range(world_of(layout))]
    source = OwnSource(folder)
    partial = [f"grad_partial@{i}" for i in range(len(LAYOUTS[layout][0][0]))]
    for state in ("master", "optim.exp_avg", "optim.exp_avg_sq", "grad", *partial):
        for name in (n for n, shape in SHAPES.items() if prod(shape) or state == "master"):
            assert torch.equal(whole(source, (state, name)), value(state, name)), (state, name)
    assert {n for s, n in source.entries if s == "buffer"} == {"everywhere", "of_stage_0", "of_stage_1"}
    facts = source.facts
    assert set(facts["optimizer"]["groups"][0]["names"]) == set(SHAPES) == {*facts["optimizer"]["scalars"], "empty"}
    assert {path: int(state["of"]) for path, state in facts["extra_state"].items()} == {"extra_0": 0, "extra_1": 1}
    source.close()


@pytest.mark.parametrize("layout", ["rows x 2", "columns x 2"])
def test_exporters_and_the_documented_reader_see_whole_tensors(saved_in: SavedIn, tmp_path: Path, layout: str) -> None:
    folder = saved_in(layout)
    by_numpy = reader(tmp_path)["read_weights"](folder / "t")
    recovered = get_fp32_state_dict_from_zero_checkpoint(folder, tag="t")
    source = OwnSource(folder / "t")
    exported = {s.name: s.whole() for s in weight_streams(source, dtype=torch.float32)}
    source.close()
    for name, shape in SHAPES.items():
        wanted = value("master", name)
        assert torch.equal(torch.from_numpy(np.array(by_numpy[name])).view(shape), wanted), name
        assert torch.equal(recovered[name], wanted) and torch.equal(exported[name], wanted), name


def test_the_cut_cannot_be_told_from_the_tensors(saved_in: SavedIn) -> None:
    folders = [str(saved_in(layout) / "t") for layout in ("rows x 2", "columns x 2")]
    assert tool(["diff", *folders, "--quiet"]) == 0


@pytest.fixture(scope="module")
def of_columns(saved_in: SavedIn) -> OwnSource:
    """A checkpoint of two tensor-parallel parts on two ranks each."""
    return OwnSource(saved_in("columns x 2") / "t")


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reading_a_part_is_slicing_the_whole(of_columns: OwnSource, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    shape = SHAPES[name]
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    region = Region(start, tuple(data.draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)))
    wanted = value("master", name)[tuple(slice(s, s + n) for s, n in zip(*region, strict=True))].reshape(-1)
    lo = data.draw(st.integers(0, wanted.numel()))
    hi = data.draw(st.integers(lo, wanted.numel()))
    out = torch.full((hi - lo,), float("nan"))
    of_columns.read(("master", name), out, start=lo, region=region)
    assert torch.equal(out, wanted[lo:hi])


@pytest.mark.parametrize(
    ("region", "start", "numel"),
    [
        (Region((0, 0), (8, 1)), 0, 1),
        (Region((1,), (1,)), 0, 1),
        (Region((0, 0), (2, 2)), 2, 3),
        (Region((6, 6), (1, 1)), 0, 1),
    ],
)
def test_a_part_outside_of_the_tensor_cannot_be_read(
    of_columns: OwnSource, region: Region, start: int, numel: int
) -> None:
    with pytest.raises(ValueError, match="master of emb is"):
        of_columns.read(("master", "emb"), torch.empty(numel), start=start, region=region)


# -- loading under ranks ------------------------------------------------------------


@pytest.mark.in_make_test("rows x 2", "columns x 2", "stages x columns", "whole x 3")
@pytest.mark.parametrize("layout", [*CUT, "whole x 3"])
def test_any_cut_loads_what_any_other_saved(request: pytest.FixtureRequest, saved_in: SavedIn, layout: str) -> None:
    loads_everywhere(request, saved_in(layout), len(LAYOUTS[layout][0][0]), (1, 2, 3, 4))


@pytest.mark.parametrize("layout", ["rows x 2", "stages x columns"])
def test_whole_tensors_for_the_optimizer_too(request: pytest.FixtureRequest, saved_in: SavedIn, layout: str) -> None:
    folder = str(saved_in(layout, True))
    for other in ("columns x 2", "whole x 3", layout):
        found = pool_of(request, world_of(other)).run(load, [other], folder, len(LAYOUTS[layout][0][0]), True)
        assert found == [[[]] for _ in found], other


def factored(layout: str, folder: str, target: str) -> tuple[str, list[str]]:
    """Save with one number a row of each local matrix, and load under ``target``; the error, and what is wrong."""
    with rank_of(LAYOUTS[layout], Granularity.PARAMETER) as rank:
        rank.fill()
        for view in rank.views:
            if (rows := rank.factored(view)) is not None:
                rank.optimizer.state[view.param]["rows"] = rows
        rank.save(folder)
    with rank_of(LAYOUTS[target], Granularity.PARAMETER) as rank:
        error = outcome(lambda: rank.load(folder))
        wrong = []
        for view in rank.views if not error else ():
            rows, found = rank.factored(view), rank.optimizer.state[view.param].get("rows")
            if (rows is None) != (found is None) or rows is not None and not torch.equal(rows, found):
                wrong.append(view.name)
        return error, wrong


def test_state_that_sees_rows_of_a_part_comes_back_to_the_same_cut_only(pool4: RankPool, tmp_path: Path) -> None:
    assert pool4.run(factored, "rows x 2", str(tmp_path / "a"), "rows x 2") == [("", [])] * 4
    for error, _ in pool4.run(factored, "rows x 2", str(tmp_path / "b"), "columns x 2"):
        assert "CheckpointError" in error and "cannot be cut anew" in error


def test_the_refusal_names_the_parameter_whose_state_has_no_place() -> None:
    segments = [Segment(name, (4,), at) for at, name in ((0, "a"), (4, "b"))]
    layout = SimpleNamespace(segments=segments, granularity=Granularity.ELEMENT)
    view: Any = SimpleNamespace(unit=SimpleNamespace(layout=layout), start=0, stop=8, name="unit[0]")
    source: Any = SimpleNamespace(entries={})
    with pytest.raises(CheckpointError, match="optimizer state 'rows' of b belongs to the layout"):
        _fillings(view, source, Comparison(parts={"b": {"rows"}}))


# -- names ------------------------------------------------------------


def load_without(layout: str, folder: str, name: str, strict: bool) -> str:  # noqa: FBT001
    """Load into a model where no rank has ``name``; the error."""
    groups = [(ranks, {n: p for n, p in places.items() if n != name}) for ranks, places in LAYOUTS[layout]]
    with rank_of(groups) as rank:
        return outcome(lambda: rank.load(folder, strict=strict))


@pytest.mark.parametrize("layout", ["stages x 2", "stages x columns", "rows x 2"])
def test_what_no_rank_has_is_refused_and_what_others_have_is_not(
    pool4: RankPool, saved_in: SavedIn, layout: str
) -> None:
    folder = str(saved_in(layout))
    for name in ("deep", "norm"):
        for error in pool4.run(load_without, layout, folder, name, True):
            (listed,) = re.findall(r"there but not in this model: (.*?)\. It may", error)
            assert listed == f"{name}, optimizer state 'exp_avg' of {name}, optimizer state 'exp_avg_sq' of {name}"
        assert pool4.run(load_without, layout, folder, name, False) == [""] * 4


def save_without(folder: str, name: str) -> None:
    groups = [(ranks, {n: p for n, p in places.items() if n != name}) for ranks, places in LAYOUTS["stages x 2"]]
    with rank_of(groups) as rank:
        rank.fill()
        rank.save(folder)


def load_or_error(layout: str, folder: str) -> str:
    with rank_of(LAYOUTS[layout]) as rank:
        return outcome(lambda: rank.load(folder))


def test_what_one_stage_lacks_is_an_error_on_all(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(save_without, str(tmp_path), "deep")
    for error in pool4.run(load_or_error, "stages x 2", str(tmp_path)):
        assert "missing there: deep" in error and "nothing was loaded" in error


def compare_live(folder: str) -> dict[str, str]:
    with rank_of(LAYOUTS["stages"]) as rank, torch.no_grad():
        for name, param in rank.module.named_parameters():
            param.copy_(value("master", name))
        engine = SimpleNamespace(wait_for_checkpoint=lambda: None, mesh=rank.mesh, module=rank.module)
        return {row.name: row.verdict for row in diff_live(engine, folder, "t")}


def test_every_rank_hears_of_the_tensors_of_all_stages(pool2: RankPool, saved_in: SavedIn) -> None:
    names = [*SHAPES, "everywhere", "of_stage_0", "of_stage_1"]
    assert pool2.run(compare_live, str(saved_in("stages"))) == [dict.fromkeys(names, "equal")] * 2


# -- what cannot be one checkpoint ------------------------------------------------------------


def save_contradiction(folder: str) -> str:
    """Two ranks that both hold the rows in the middle."""
    (first, a), (second, b) = LAYOUTS["rows"]
    with rank_of([(first, {**a, "emb": ((0, 0), (5, 6))}), (second, {**b, "emb": ((4, 0), (3, 6))})]) as rank:
        rank.fill()
        return outcome(lambda: rank.save(folder))


def test_parts_that_overlap_are_refused_before_the_checkpoint_has_its_name(pool2: RankPool, tmp_path: Path) -> None:
    for error in pool2.run(save_contradiction, str(tmp_path)):
        assert "elements 24 to 30 of master of 'emb' were written by 2 ranks" in error
    assert list(tmp_path.iterdir()) == []


# -- facts ------------------------------------------------------------


def save_with_ways(folder: str) -> Any:
    """Save and load; what clients are told of the ways."""
    with rank_of(LAYOUTS["rows x 2"]) as rank:
        rank.fill()
        rank.save(folder, ways={"pp": 1, "tp": 2})
        return client_state(rank.load(folder))["checkpoint_parallel_dimensions"]


def test_the_ways_of_the_model_are_facts(pool4: RankPool, tmp_path: Path) -> None:
    assert pool4.run(save_with_ways, str(tmp_path)) == [{"pp_degree": 1, "tp_degree": 2}] * 4
    world = json.loads((tmp_path / "t" / "manifest.json").read_bytes())["facts"]["world"]
    assert world == {"size": 4, "compute_dtype": "bf16", "data": 2, "pp": 1, "tp": 2}


# -- the format is what it was ------------------------------------------------------------


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """What the release before parts of tensors saved: "whole x 2", the same values."""
    with tarfile.open(SAVED_BY_EARLIER_RELEASE) as archive:
        archive.extractall(tmp_path / "earlier", filter="data")
    return tmp_path / "earlier"


def test_an_earlier_checkpoint_loads_under_any_cut(request: pytest.FixtureRequest, earlier: Path) -> None:
    """Of any number of ranks: it is, byte for byte, what is saved now."""
    assert verify(earlier / "t") == []
    loads_everywhere(request, earlier, 2, (2,))


def test_whole_tensors_are_saved_byte_for_byte_as_before(saved_in: SavedIn, earlier: Path) -> None:
    folders = earlier / "t", saved_in("whole x 2") / "t"
    for name in ("rank_00000.bin", "rank_00001.bin"):
        before, now = ((folder / name).read_bytes() for folder in folders)
        assert before == now
    told = [json.loads((folder / "manifest.json").read_bytes()) for folder in folders]
    for each in told:
        del each["crc32c"], each["facts"]["saved"]
    assert told[0] == told[1] and told[1]["version"] == 1
    assert not any(len(box) > 6 for tensor in told[1]["tensors"] for box in tensor["boxes"])
