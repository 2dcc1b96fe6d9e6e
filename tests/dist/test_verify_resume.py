"""``ds_verify resume``: the user's model, other ranks, the exit codes and the sentences for wrong input."""

import json
from pathlib import Path

import pytest

from deepspeed.tools.verify.cli import main
from deepspeed.tools.verify.resume import built_in_cells, difference

pytestmark = pytest.mark.timeout(180)
HERE = "tests.dist.test_verify_cli"


def test_users_model_and_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_model_that_cannot_be_resumed_fails_and_the_field_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "--model", f"{HERE}:build_unrepeatable", "--steps", "2", "--at", "1", "--ranks", "1"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown and "loss: number" in shown


def test_cells_are_the_documented_product() -> None:
    assert len(built_in_cells()) == len({cell.label for cell in built_in_cells()}) == 4 * 7 + 3


def test_the_first_difference_is_named() -> None:
    assert difference({"params": {"a": "1"}}, {"params": {"a": "1"}}) == ""
    assert difference({"opt": {"m of a": "1"}}, {"opt": {}}).startswith(
        "opt: m of a (1 without the interruption, absent after"
    )
