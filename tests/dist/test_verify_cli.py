"""``ds_verify grads``: the table, the exit codes, and the sentences for wrong input."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.tools.verify.cli import main
from deepspeed.tools.verify.grads import matrix_cells, scaled_error
from deepspeed.tools.verify.models import Case
from deepspeed.tools.verify.reference import train_reference
from deepspeed.tools.verify.user_model import case_of, default_loss, invented_batch

pytestmark = pytest.mark.timeout(180)


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


def test_built_in_model_passes_at_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grads"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" ok") == 4 and "4 cells on 2 ranks" in shown


def test_users_model_and_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    config.write_text(
        json.dumps({
            "train_batch_size": 64,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": True},
            "optimizer": {"type": "Lamb", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }),
        encoding="utf-8",
    )  # fmt: skip
    assert main(["grads", "--model", f"{HERE}:build_with_data", "--config", str(config)]) == 0
    shown = capsys.readouterr().out
    assert "set aside from the configuration (but for the dtypes): bf16, optimizer, train_batch_size" in shown
    assert main(["grads", "--model", f"{HERE}:build", "--ranks", "1", "--steps", "1"]) == 0


def test_a_model_that_cannot_agree_fails_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grads", "--model", f"{HERE}:build_unrepeatable", "--steps", "1"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown and "largest error" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", f"{HERE}:no_such_function"], "has no attribute 'no_such_function'"),
        (["--model", f"{HERE}:build_nothing"], "must return a module"),
    ],
)
def test_wrong_input_is_a_sentence_and_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grads", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("ds_verify: ") and words in told and "Traceback" not in told


def test_matrix_is_the_documented_product() -> None:
    cells = matrix_cells()
    assert len(cells) == len({cell.label() for cell in cells}) == 4 * 2 * 2 * 2 * 6


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
