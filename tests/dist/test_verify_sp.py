"""``ds_verify sp``: sequences that ranks share beside one process, of an odd length, packed and around a ring."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed.tools.verify.cli import main
from deepspeed.tools.verify.layouts.sp import fed
from deepspeed.tools.verify.models import MicroBatch, case_named
from tests.harness.sequences import Decoder, decoder, stand_in

CONFIG = {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2, "gradient_clipping": 0.5}


def build() -> Decoder:
    sys.modules["transformers"] = stand_in
    return decoder(keys=2)


class Undivided(nn.Module):
    """No model of Transformers: nobody divides what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(29, 29)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.scores(input_ids).flatten(0, 1), labels.flatten())}


def test_a_model_passes_whole_odd_packed_and_around_a_ring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    given = ["--model", f"{__name__}:build", "--config", str(tmp_path / "ds.json"), "--ranks", "2", "--steps", "2"]
    status = main(["sp", *given])
    shown = capsys.readouterr().out
    rows = re.findall(r"(\w+) +(\w+) +- +2 .* ok\n", shown)
    assert rows == [("whole", "auto"), ("odd", "auto"), ("packed", "auto"), ("packed", "ring")], shown
    assert status == 0 and "4 rows on 2 ranks, 2 steps each, tolerance 1e-06: all pass" in shown


def test_sums_over_ranks_that_each_had_all_tokens_are_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG | {"sequence": {"attention": "auto"}}))
    given = ["--model", f"{__name__}:Undivided", "--config", str(tmp_path / "ds.json"), "--ranks", "2", "--steps", "1"]
    assert main(["sp", *given]) == 1
    assert re.search(r"whole .* FAIL\n +largest error \S+ in (norm|grad)", capsys.readouterr().out)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_the_small_model_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    assert main(["sp", "--config", str(tmp_path / "ds.json"), "--ranks", "2", "--steps", "1"]) == 0
    assert "all pass" in capsys.readouterr().out


def test_rows_are_of_an_odd_length_or_of_several_documents() -> None:
    tokens = torch.arange(8).view(2, 4)
    case, place = case_named("plain", batch=lambda _: tokens), MicroBatch(0, 0, 0, 1)
    assert [fed(case, kind).batch(place)["labels"].shape for kind in ("whole", "odd")] == [(2, 16), (2, 15)]
    assert fed(case, "packed").batch(place)["position_ids"][1].tolist() == [*range(5), *range(10), 0]
    with pytest.raises(ValueError, match="batch_fn must return a dict with 'input_ids'"):
        fed(case_named("plain"), "odd").batch(place)
