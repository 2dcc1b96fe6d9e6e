"""Gates of ``ds_verify`` as a user runs them: models of their own, the exit codes, a sentence for wrong input."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.tools.simulate.costs import load_machine
from deepspeed.tools.simulate.run import _elsewhere
from deepspeed.tools.verify import training
from deepspeed.tools.verify.cli import main
from deepspeed.tools.verify.data import faults, train
from deepspeed.tools.verify.grads import DTYPE_KEYS, matrix_cells, scaled_error
from deepspeed.tools.verify.layouts.moe import judge_wire, wire_bytes
from deepspeed.tools.verify.models import Case
from deepspeed.tools.verify.reference import train_reference
from deepspeed.tools.verify.resume import built_in_cells, difference, moved
from deepspeed.tools.verify.runs import Setup
from deepspeed.tools.verify.user_model import case_of, default_loss, invented_batch

pytestmark = pytest.mark.timeout(300)


class Language(nn.Module):
    """A user's model with dropout and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.embed(tokens)))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), "logits": logits}


class Bare(nn.Module):
    """Returns its only parameter: the loss is the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, _x: Tensor) -> Tensor:
        return self.weight


def build() -> nn.Module:
    """The simplest contract: a model alone."""
    return Language()


def build_with_data() -> tuple[object, ...]:
    """The full contract: model, batches and loss."""

    def batch(step: int, micro: int, rank: int, world: int) -> dict[str, Tensor]:
        return {"tokens": torch.arange(12).view(2, 6).add(step + micro + rank * 5) % 13}

    return Language(), batch, lambda output, batch: output["loss"] * 2


class Unrepeatable(nn.Module):
    """Draws weights from the system's entropy in every forward: two runs can never agree."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * torch.rand((), generator=torch.Generator().manual_seed(torch.seed() % 2**31))


def build_unrepeatable() -> nn.Module:
    """A model the gate must fail."""
    return Unrepeatable()


def build_nothing() -> int:
    """Not a model."""
    return 3


HERE = "tests.dist.test_verify_cli"


def test_users_model_and_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    given = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Lamb", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    config.write_text(json.dumps(given), encoding="utf-8")
    assert main(["grads", "--model", f"{HERE}:build_with_data", "--config", str(config), "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "set aside from the configuration (but for the dtypes): bf16, optimizer, train_batch_size" in shown
    assert main(["grads", "--model", f"{HERE}:build", "--ranks", "1", "--steps", "1"]) == 0


def test_a_model_that_cannot_agree_fails_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grads", "--model", f"{HERE}:build_unrepeatable", "--steps", "1"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown and "largest error" in shown


def test_wrong_input_is_a_sentence_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    for function, words in (
        ("no_such_function", "has no attribute 'no_such_function'"),
        ("build_nothing", "must return a module"),
    ):
        assert main(["grads", "--model", f"{HERE}:{function}"]) == 2
        told = capsys.readouterr().err
        assert told.startswith("ds_verify: ") and words in told and "Traceback" not in told


def test_cells_are_the_documented_products() -> None:
    cells = matrix_cells()
    assert len(cells) == len({cell.label() for cell in cells}) == 4 * 2 * 2 * 2 * 6
    assert len(built_in_cells()) == len({cell.label for cell in built_in_cells()}) == 4 * 7 + 3


def test_errors_are_infinite_for_nan_and_wrong_shapes() -> None:
    assert scaled_error(torch.tensor([float("nan")]), torch.zeros(1)) == float("inf")
    assert scaled_error(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert scaled_error(torch.empty(0), torch.empty(0)) == 0.0
    assert scaled_error(torch.tensor([101.0]), torch.tensor([100.0])) == pytest.approx(0.01)


def test_inputs_are_invented_from_the_first_layer() -> None:
    assert invented_batch(nn.Sequential(nn.Embedding(5, 2)))(0, 0, 0, 1).dtype == torch.int64
    assert invented_batch(nn.Sequential(nn.Conv2d(3, 4, 3)))(0, 0, 0, 1).shape[1] == 3
    with pytest.raises(ValueError, match="batch_fn"):
        invented_batch(nn.LayerNorm(4))
    assert default_loss((torch.tensor([2.0, 2.0]), None), None) == 4.0
    with pytest.raises(ValueError, match="loss_fn"):
        default_loss("text", None)
    assert case_of(f"{HERE}:build", {"gradient_accumulation_steps": 3, "gradient_clipping": 0}).accumulation == 3


def test_the_reference_keeps_a_loss_as_it_was_before_the_step() -> None:
    case = Case("bare", Bare, lambda place: torch.zeros(1), lambda model, batch, place: [model(batch)])
    first, second = train_reference(case, world=1, steps=2)
    assert first.losses[0, 0][0] == 1 and second.losses[0, 0][0] == first.params["weight"] != 1


# -- verify data ----------------------------------------------------------------------------------------------------
def test_no_sample_twice_none_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--save-n", "3", "--load-n", "2", "--workers", "2", "--samples", "101"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("101 samples: no sample twice, none missing\n") and "then saved" in shown


@pytest.mark.parametrize(
    ("saving", "loading", "samples", "batch", "workers", "at"), [(1, 2, 101, 3, 0, 0), (2, 2, 21, 4, 1, 3)]
)
def test_ends_of_an_epoch(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    saving: int,
    loading: int,
    samples: int,
    batch: int,
    workers: int,
    at: int,
) -> None:
    first, second = (request.getfixturevalue(f"pool{world}") for world in (saving, loading))
    before = first.run(train, str(tmp_path), samples, batch, workers, at)
    after = second.run(train, str(tmp_path), samples, batch, workers, None)
    assert faults(before, after, samples) == []


def test_a_rank_that_fails_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--save-n", "1", "--load-n", "1", "--workers", "0", "--samples", "4")
    assert main(["data", *sizes, "--time-limit", "0.001"]) == 1
    assert capsys.readouterr().out.endswith("FAIL\n")


def test_the_first_offenders_are_named() -> None:
    assert faults([[3, 0], [1, 4]], [[2], [5]], 6) == []
    assert faults([[3, 0], [1, 4]], [[0], [2]], 6) == [
        "1 seen twice: 0 (rank 0 of the save, rank 0 of the load)",
        "1 missing: 5",
    ]
    assert faults([[0], [1]], [[2], [3], [0]], 5) == [
        "1 seen twice: 0 (rank 0 of the save, rank 2 of the load)",
        "1 missing: 4",
    ]
    assert faults([[0], [1]], [[2, 3], [4]], 5) == ["load: ranks saw [1, 2] samples"]
    places = ["rank 0 of the save", *["rank 0 of the load"] * 18]
    assert faults([[0, 1]], [[1] * 18], 20)[0] == f"1 seen twice: 1 ({', '.join(places)})"
    assert faults([[0]], [[]], 20) == ["19 missing: 1, 2, 3, 4, 5, 6, 7, 8, ..."]
    # Padding is not counted.
    assert faults([[0], [1]], [[2, 4], [3, 0]], 5) == []
    assert faults([[0, 2], [1, 0]], [[], []], 3) == []
    assert faults([[0, 2], [1, 0]], [[1], [2]], 3) != []


# -- verify moe -----------------------------------------------------------------------------------------------------
def test_a_decoder_of_experts_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "expert_parallel": {"enabled": False}}))
    assert main(["moe", "--ranks", "2", "--steps", "2", "--config", str(config)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"chosen +- +2 .* ok\n", shown) and re.search(r"the first +- +2 .* ok\n", shown)
    assert re.search(r"bytes on the wire  [\d,]+ bytes, as the formula says  ok\n\n3 rows .*: all pass", shown)


def test_a_token_is_reckoned_once_for_each_rank_that_has_one_of_its_experts() -> None:
    """Two ranks of four experts: the first token stays with one of them, the second goes to both."""
    index, hidden, weights = torch.tensor([[0, 3], [1, 4]]), torch.zeros(2, 16), torch.zeros(2, 2)
    of_row = 2 * 16 * 4 + 2 * (4 + 8)
    assert wire_bytes(index, 2, 4, hidden, weights) == 3 * of_row + 3 * 8 * 2


def test_bytes_beside_the_formula_are_a_fault() -> None:
    assert judge_wire([(100, 90), (100, 110)]).fault == ""
    assert judge_wire([(100, 90), (100, 100)]).fault == "the ranks sent 200 bytes, the formula says 190"
    assert judge_wire([(0, 0)]).fault  # nothing was exchanged


# -- verify resume --------------------------------------------------------------------------------------------------
def test_users_model_and_configuration_of_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    arguments = ["resume", "--model", f"{HERE}:build_with_data", "--config", str(file), "--steps", "4", "--at", "2"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("identical: loss, params, opt, lr, rng, scaler") == 3 and "open window" in shown
    assert main([*arguments, "--load-ranks", "1"]) == 0
    assert "state hash" in capsys.readouterr().out


def test_a_load_on_other_ranks_takes_every_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that says how it saves."""
    file = tmp_path / "ds.json"
    config = {"zero_optimization": {"stage": 2}, "checkpoint": {"keep_last": 3}}
    file.write_text(json.dumps(config), encoding="utf-8")
    assert main(["resume", "--config", str(file), "--load-ranks", "1", "--steps", "4", "--at", "2"]) == 0
    assert capsys.readouterr().out.count("state hash") == 2


def test_either_name_of_a_dtype_is_known() -> None:
    config = {"bfloat16": {"enabled": True}}
    assert Setup("resume", "plain", config).dtype == torch.bfloat16 and set(config) <= set(DTYPE_KEYS)


def test_losses_after_a_load_that_are_no_numbers_fail() -> None:
    wanted, again = ({"a": "1"}, [0.5, 0.4, 0.3]), ({"a": "1"}, [0.5, math.nan, math.nan])
    assert moved(wanted, wanted, 1e-5).fault == ""
    assert "differ by nan" in moved(wanted, again, 1e-5).fault


def test_a_check_and_a_prediction_write_nothing_into_the_records_of_a_run(tmp_path: Path) -> None:
    written = ("observe", "flops_profiler", "csv_monitor", "prometheus", "tensorboard", "wandb", "comet")
    plain = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": None}
    config = {**plain, **{name: {"enabled": True} for name in written}}
    assert not set(written) & Setup("resume", "plain", config).settings(str(tmp_path)).keys()
    with _elsewhere(load_machine("h100"), config, 2) as simulated:
        assert simulated == plain


def test_a_gate_trains_on_the_cpu_whatever_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.setattr(training, "check_rates", lambda driver: chosen.append(os.environ["DS_ACCELERATOR"]) or 0)
    assert main(["lr"]) == 0 and chosen == ["cpu"] and not os.environ["DS_ACCELERATOR"]


def test_a_model_that_cannot_be_resumed_fails_and_the_field_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "--model", f"{HERE}:build_unrepeatable", "--steps", "2", "--at", "1", "--ranks", "1"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown and "loss: number" in shown


def test_the_first_difference_is_named() -> None:
    assert difference({"params": {"a": "1"}}, {"params": {"a": "1"}}) == ""
    assert difference({"opt": {"m of a": "1"}}, {"opt": {}}).startswith(
        "opt: m of a (1 without the interruption, absent after"
    )
