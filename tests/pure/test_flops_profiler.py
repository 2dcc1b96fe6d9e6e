"""The flops profiler counts what a model computes: as the formulas of the papers say, recomputation apart."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import UsageError
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from deepspeed.profiling.flops_profiler.report import amount
from deepspeed.profiling.peak import peak_tflops
from deepspeed.tools.simulate.models import Decoder, Shape

BATCH, LENGTH = 3, 32
GPT = Shape(width=64, blocks=2, heads=4, inner=256, vocabulary=101, positions=64, key_heads=4)
LLAMA = Shape(width=64, blocks=2, heads=4, inner=172, vocabulary=101, positions=64, key_heads=2, gated=True)
SHAPES = {"gpt": GPT, "llama": LLAMA}


def by_hand(shape: Shape) -> int:
    """A forward: 2 operations a weight and token, and 4 * length * width for the scores (PaLM, appendix B)."""
    narrow = shape.key_heads * shape.channels
    attention = 2 * shape.width * shape.width + 2 * shape.width * narrow
    inner = (3 if shape.gated else 2) * shape.width * shape.inner
    weights = shape.blocks * (attention + inner) + shape.width * shape.vocabulary
    scores = shape.blocks * 4 * LENGTH * shape.width
    return BATCH * LENGTH * (2 * weights + scores)


def profiled(model: nn.Module, run: Callable[[], torch.Tensor]) -> FlopsProfiler:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    run().backward()
    profiler.stop_profile()
    return profiler


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_a_decoder_counts_as_the_formula_says_within_two_percent(name: str, recompute: bool) -> None:
    shape = SHAPES[name]
    model = Decoder(shape, recompute=recompute)
    tokens = torch.randint(shape.vocabulary, (BATCH, LENGTH))
    profiler = profiled(model, lambda: model(tokens))
    forward = by_hand(shape)
    assert profiler.get_total_flops() == pytest.approx(forward, rel=0.02)
    assert profiler.get_total_macs() == pytest.approx(forward / 2, rel=0.02)
    assert profiler.get_total_backward_flops() == pytest.approx(2 * forward, rel=0.02)
    again = profiler.get_total_recomputed_flops()
    # the scores are made again in any backward, the blocks (but for their last product) by checkpoints
    assert 0.6 < again / forward < 1.05 if recompute else 0 < again / forward < 0.05
    assert profiler.get_total_params() == sum(p.numel() for p in model.parameters())
    assert not model._forward_hooks and not model._forward_pre_hooks


class Recomputing(nn.Module):
    """A layer, and one behind a checkpoint of either kind."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        behind = lambda y: torch.relu(self.second(y)).square()  # noqa: E731
        return checkpoint(behind, self.first(x), use_reentrant=self.reentrant).sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_repeats_is_no_backward(reentrant: bool) -> None:
    model = Recomputing(reentrant=reentrant)
    profiler = profiled(model, lambda: model(torch.ones(4, 8, requires_grad=True)))
    product = 2 * 4 * 8 * 8
    assert profiler.get_total_flops() == 2 * product
    assert profiler.get_total_backward_flops() == 4 * product
    assert profiler.get_total_recomputed_flops() == product


def test_the_table_says_what_each_module_does() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 4)))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(5, 8))
    profiler.stop_profile()
    rows = {m.name: m for m in profiler.profile().modules}
    assert {name: (m.kind, m.depth, m.params, m.flops) for name, m in rows.items()} == {
        "": ("Sequential", 0, 212, 2 * 5 * (128 + 64)),
        "0": ("Linear", 1, 144, 2 * 5 * 128),
        "1": ("ReLU", 1, 0, 0),
        "2": ("Sequential", 1, 68, 2 * 5 * 64),
        "2.0": ("Linear", 2, 68, 2 * 5 * 64),
    }
    assert rows["0"].seconds > 0 and rows[""].seconds > rows["0"].seconds + rows["2"].seconds
    assert profiler.get_total_duration() == rows[""].seconds


def test_ignored_classes_and_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 36, 2))
    profiler = FlopsProfiler(model)
    profiler.start_profile([nn.Linear])
    with pytest.raises(UsageError, match="stop_profile"):
        profiler.start_profile()  # it runs
    model(torch.ones(2, 3, 6, 6))
    profiler.stop_profile()
    assert profiler.get_total_flops() == 2 * (2 * 4 * 36) * (3 * 9)
    profiler.end_profile()
    assert profiler.get_total_flops() == 0


def test_get_model_profile_leaves_each_module_its_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    model[1].eval()
    get_model_profile(model, (3, 4), print_profile=False)
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_get_model_profile_returns_what_clients_expect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = nn.Linear(1000, 500)
    assert get_model_profile(model, (4, 1000)) == ("4.000 MFLOPS", "2.000 MMACs", "500.500 K")
    assert "multiply-adds, forward  2.000 MMACs" in capsys.readouterr().out
    counted = get_model_profile(model, args=[torch.ones(1, 1000)], as_string=False, print_profile=False)
    assert counted == (1_000_000, 500_000, 500_500)
    assert model.training and capsys.readouterr().out == ""
    path = tmp_path / "new" / "profile.txt"
    get_model_profile(model, kwargs={"input": torch.ones(1, 1000)}, output_file=str(path), detailed=False)
    assert "Linear" in path.read_text() and "Every module" not in path.read_text()


class Writer(nn.Linear):
    def generate(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self(x)
        return x


def test_generate_is_profiled_as_a_whole() -> None:
    call = {"args": [torch.ones(1, 4)], "kwargs": {"times": 3}, "mode": "generate"}
    assert get_model_profile(Writer(4, 4), **call, as_string=False, print_profile=False) == (3 * 32, 3 * 16, 20)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: get_model_profile(m), "needs an input"),
        (lambda m: get_model_profile(m, (1, 4), mode="training"), "use 'forward' or 'generate'"),
        (lambda m: get_model_profile(m, (1, 4), mode="generate"), "Linear has no generate()"),
        (lambda m: get_model_profile(m, [1, 4]), "pass a tuple"),
        (lambda m: get_model_profile(m, (1, 4), output_file="/proc/no/such"), "Choose another file"),
    ],
)
def test_bad_input_is_a_sentence(call: Callable[[nn.Module], object], text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("(", r"\(").replace(")", r"\)")):
        call(nn.Linear(4, 4))


def test_a_forward_that_raises_leaves_the_rows_right() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Flatten())
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model[1].end_dim = 5  # there is no such one
    with pytest.raises(IndexError):
        model(torch.ones(3, 2))
    model[1].end_dim = -1
    model(torch.ones(3, 2))
    profiler.stop_profile()
    assert {m.name: m.flops for m in profiler.profile().modules} == {"": 2 * 24, "0": 2 * 24, "1": 0}


def test_amounts_are_scaled_by_a_thousand() -> None:
    assert [amount(v, "B") for v in (0, 999, 1000, 2_500_000)] == ["0 B", "999 B", "1.000 KB", "2.500 MB"]
    assert amount(0.0025, "s") == "2.500 ms" and amount(7, "") == "7"


def test_the_peak_is_that_of_the_device_by_name_and_dtype() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3", "bf16") == 989.4
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5
    assert peak_tflops("NVIDIA H200 NVL", "bf16") == 835.0 and peak_tflops("NVIDIA L4", "bf16") == 121.0
    for other in ("NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA T400 4GB", "NVIDIA GB200"):
        assert peak_tflops(other, "fp16") is None, "a name within a name is another device"
    assert peak_tflops("Tesla V100-SXM2-32GB", "bf16") is None and peak_tflops("cpu", "fp32") is None
