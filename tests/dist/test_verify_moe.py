"""``ds_verify moe``: experts that ranks divide beside one process, ranks without tokens, and bytes by the formula."""

import json
import re
from pathlib import Path

import pytest
import torch

from deepspeed.tools.verify.cli import main
from deepspeed.tools.verify.layouts.moe import judge_wire, wire_bytes


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
