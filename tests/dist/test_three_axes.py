"""Pipeline stages, tensor-parallel ranks and data-parallel ranks together, under ZeRO: the numbers of one process,
checkpoints that move between layouts, and ``ds_verify 3d``, which measures both.
"""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.tools.verify.cli import main
from deepspeed.tools.verify.driver import Driver
from deepspeed.tools.verify.layouts.schedule import usual_chunks
from deepspeed.tools.verify.layouts.three_axes import (
    KINDS,
    GridCell,
    compare_layouts,
    matrix_cells,
    moved,
    run_cell,
    visit,
)
from deepspeed.tools.verify.models import ResidualAttention, ResidualFeedForward
from deepspeed.tools.verify.reference import train_reference
from tests.harness.pool import RankPool

pytestmark = pytest.mark.timeout(240)
HERE = "tests.dist.test_three_axes"


def cell(*sizes: int, schedule: str = "1f1b", **fields: Any) -> GridCell:
    """``sizes``: data x pipeline x tensor ranks, ZeRO."""
    return GridCell(*sizes, schedule, usual_chunks(schedule), **fields)  # type: ignore[arg-type]


def pool_of(request: pytest.FixtureRequest, one: GridCell) -> RankPool:
    pool: RankPool = request.getfixturevalue(f"pool{one.ranks}")
    return pool


# Each pair of axes, every level of ZeRO, every schedule of the matrix and two more.
COVERING = [
    cell(1, 2, 2, 1), cell(1, 2, 2, 3, schedule="zero_bubble"), cell(2, 2, 1, 2, schedule="interleaved"),
    cell(2, 1, 2, 3, schedule="gpipe"), cell(1, 2, 2, 0, schedule="zbv"),
]  # fmt: skip


TOLERANCE = 2e-6  # the default of `ds_verify three-axes`


@pytest.mark.in_make_test("1 2 2 3 zero_bubble", "2 2 1 2 interleaved", "2 1 2 3 gpipe")
@pytest.mark.parametrize("one", COVERING, ids=lambda one: " ".join(one.label()))
def test_a_layout_trains_as_one_process(request: pytest.FixtureRequest, one: GridCell) -> None:
    records = train_reference(one.case(), world=one.dp)
    answers = pool_of(request, one).run(run_cell, one, records)
    for errors, _ in answers:
        assert max(errors[kind] for kind in KINDS)[0] <= TOLERANCE, errors
    assert set().union(*(names for _, names in answers)) == set(records[0].params)


def test_the_matrix_is_the_documented_product() -> None:
    cells = matrix_cells()
    assert len({one.label() for one in cells}) == len(cells) == 2**3 * 4 * 3
    assert [one.ranks for one in cells] == sorted(one.ranks for one in cells)
    assert {one.ranks for one in matrix_cells(2)} == {1, 2}


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_every_layout_of_eight_ranks_is_supported_and_trains_as_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["3d", "--matrix", "--time-limit", "120"]) == 0
    assert "96 of 96 layouts compared, 0 unsupported; " in capsys.readouterr().out


# -- checkpoints ------------------------------------------------------------------------------------------------------
LAYOUTS = {
    "one rank": cell(1, 1, 1, 0),
    "parts": cell(1, 1, 2, 3),
    "stages of parts": cell(1, 2, 2, 2),
    "four parts": cell(1, 1, 4, 3),
    "stages of data ranks": cell(2, 2, 1, 3),
}


@pytest.mark.in_make_test("stages of parts-one rank", "one rank-stages of parts")
@pytest.mark.parametrize(
    ("before", "after"),
    [("stages of parts", name) for name in LAYOUTS if name != "stages of parts"] + [("one rank", "stages of parts")],
)
def test_a_run_goes_on_at_any_other_layout(
    request: pytest.FixtureRequest, tmp_path: Path, before: str, after: str
) -> None:
    first, second = LAYOUTS[before], LAYOUTS[after]
    saved = pool_of(request, first).run(visit, first, str(tmp_path), None, "t")[0]
    for answer in pool_of(request, second).run(visit, second, str(tmp_path), "t", None):
        assert moved(saved, answer, TOLERANCE)[1] == ""


def test_a_state_that_differs_is_named() -> None:
    assert moved(({"a": "1", "b": "2"}, [1.0]), ({"a": "1"}, [1.0]), TOLERANCE)[1] == "1 of 2 names differ, first b"
    for loss in (1.0, 1e-3):  # an error is relative to the loss, also to a small one
        assert "differ by 1.0e-01" in moved(({"a": "1"}, [loss]), ({"a": "1"}, [1.1 * loss]), TOLERANCE)[1]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_eight_ranks_go_on_at_four_other_layouts_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["3d", "--checkpoints", "--time-limit", "120"]) == 0
    assert "32 loads: same state, same losses" in capsys.readouterr().out


# -- the command ------------------------------------------------------------------------------------------------------
class Vectors(nn.Module):
    """Word ids to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


def build() -> Any:
    """A user's list of layers, with dropout."""
    layers = [Vectors(), ResidualAttention(1), nn.Dropout(0.5), ResidualFeedForward(2), nn.Linear(16, 13, bias=False)]
    return nn.Sequential(*layers), lambda *place: torch.arange(8).view(2, 4).add(sum(place)) % 13


class Blocks(nn.Module):
    """A user's model with a list of blocks, of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 12)
        self.blocks = nn.ModuleList(OneHead() for _ in range(2))
        self.head = nn.Linear(12, 13)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


class OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 1, 12
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 12)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return x + self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def build_of_one_head() -> Any:
    """The contract with a dict of arguments."""
    return Blocks(), lambda *place: {"ids": torch.arange(8).view(2, 4).add(sum(place)) % 13}


def _refusal(one: GridCell) -> str:
    try:
        one.start(one.case()).destroy()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_layout_that_is_refused_is_counted_apart_with_the_words_of_initialize(
    capsys: pytest.CaptureFixture[str], pool2: RankPool
) -> None:
    refused = replace(LAYOUTS["parts"], model=f"{HERE}:build_of_one_head")
    good = replace(refused, tp=1, pp=2)
    reason = pool2.run(_refusal, refused)[0]
    assert "autotp_size 2 does not fit the attention of blocks.0, whose heads are 1" in reason
    with Driver(Namespace(steps=1, tolerance=TOLERANCE, time_limit=60.0), sys.stdout) as driver:
        assert compare_layouts(driver, [refused, good]) == 0
    _, first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("1   1   2   3     1f1b") and first.endswith(f"unsupported: {reason}")
    assert second.endswith("  ok") and last.startswith("1 of 2 layouts compared, 1 unsupported; ")


def test_a_users_layers_are_compared_without_dropout(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--ranks", "2", "--pp", "2", "--zero", "2", "--steps", "2", "--schedule", "zero_bubble"]
    assert main(["3d", "--model", f"{HERE}:build", *asked]) == 0
    assert "1 of 1 layouts compared, 0 unsupported" in capsys.readouterr().out


def test_a_schedule_that_no_layout_supports_is_a_sentence_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["3d", "--schedule", "1f1b", "--chunks", "2", "--ranks", "1", "--zero", "0"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("ds_verify: no layout is supported: PipelineErr") and "Traceback" not in shown


def test_an_error_beyond_the_tolerance_fails(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--ranks", "1", "--pp", "1", "--zero", "3", "--tolerance", "1e-12", "--steps", "2"]
    assert main(["3d", *asked]) == 1
    assert "largest error" in capsys.readouterr().out
