"""The host kernels compute what torch computes, to the same bits however the work is cut and whatever the machine's
vectors.
"""

import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.accelerator.native.build import built, try_load
from deepspeed.accelerator.native.spec import CPU_ADAGRAD, CPU_ADAM, CPU_LION
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.optim import host
from deepspeed.optim.rules import Lion
from tests.budget.source import ROOT
from tests.harness.aio import in_a_child
from tests.harness.warm import Warm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ADAM = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
COUNT = 1003  # no multiple of any vector width

pytestmark = pytest.mark.skipif(
    try_load(CPU_ADAM) is None, reason="no C++ compiler: the fallback is what the other tests run"
)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


FP32 = torch.float32


def tensors(
    count: int = COUNT, *, weight: torch.dtype = FP32, grad: torch.dtype = FP32, moment: torch.dtype = FP32
) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(count)
    weights, gradient, first = (torch.randn(count, generator=draw) for _ in range(3))
    return [weights.to(weight), gradient.to(grad), first.to(moment), first.square().to(moment)]


def adam(values: list[torch.Tensor], step: int = 3, **changes: object) -> None:
    host.adam_step(*values, step=step, **ADAM | changes)


@pytest.mark.parametrize("out", [None, torch.bfloat16])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("start", [0, 3])  # the second is where no vector begins
def test_adam_beside_is_adam_in_place_and_leaves_the_old_values(
    grad: torch.dtype, out: torch.dtype | None, start: int
) -> None:
    values = [t[start:] for t in tensors(1 << 15, grad=grad)]
    before = [t.clone() for t in values]
    new = [torch.empty(1 << 15)[start:] for _ in range(3)]
    rounded = [None if out is None else torch.empty(values[0].numel(), dtype=out) for _ in range(2)]
    adam(values, out=rounded[0], beside=new, grad_scale=0.3)
    assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True))
    adam(values, out=rounded[1], grad_scale=0.3)
    for mine, wanted in zip(new, (values[0], *values[2:]), strict=True):
        assert torch.equal(mine, wanted)
    assert out is None or torch.equal(*rounded)


# --- the arithmetic ---


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda p: DeepSpeedCPUAdam(p, **ADAM), lambda p: torch.optim.AdamW(p, **ADAM)),
        (lambda p: DeepSpeedCPUAdam(p, **ADAM, adamw_mode=False), lambda p: torch.optim.Adam(p, **ADAM)),
        (
            lambda p: DeepSpeedCPUAdagrad(p, lr=0.1, weight_decay=0.1),
            lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
        ),
        (lambda p: FusedAdam(p, **ADAM), lambda p: torch.optim.AdamW(p, **ADAM)),
        (lambda p: DeepSpeedCPULion(p, lr=1e-2, weight_decay=0.1), lambda p: Lion(p, lr=1e-2, weight_decay=0.1)),
    ],
    ids=["adamw", "adam", "adagrad", "fused adamw", "lion"],
)
def test_the_named_classes_run_on_the_kernels(ours: object, theirs: object, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("adam_step", "adagrad_step", "lion_step"):
        kernel = getattr(host, name)
        monkeypatch.setattr(
            host, name, lambda *a, _kernel=kernel, _name=name, **k: (calls.append(_name), _kernel(*a, **k))
        )
    one, other = (torch.nn.Parameter(tensors(shape)[0].view(17, 59)) for shape in (COUNT, COUNT))
    mine, reference = ours([one]), theirs([other])
    for step in range(5):
        one.grad = torch.randn(17, 59, generator=torch.Generator().manual_seed(step))
        other.grad = one.grad.clone()
        mine.step()
        with monkeypatch.context() as without:
            without.setattr(host, "usable", lambda *_: False)
            reference.step()
    torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    assert len(calls) == 5


@pytest.mark.parametrize(("grad", "moment", "out"), list(itertools.product(DTYPES, DTYPES, (None, *DTYPES))))
def test_every_dtype_is_the_fp32_rule_with_rounded_inputs_and_outputs(
    grad: torch.dtype, moment: torch.dtype, out: torch.dtype | None
) -> None:
    low = tensors(grad=grad, moment=moment)
    wide = [t.float().clone() for t in low]
    rounded = None if out is None else torch.empty(COUNT, dtype=out)
    adam(low, out=rounded)
    adam(wide)
    assert torch.equal(low[0], wide[0])
    assert torch.equal(low[2], wide[2].to(moment)) and torch.equal(low[3], wide[3].to(moment))
    assert rounded is None or torch.equal(rounded, low[0].to(out))


NAMED = {
    "cpu adamw": lambda p, fp32: DeepSpeedCPUAdam(p, **ADAM, fp32_optimizer_states=fp32),
    "cpu adam": lambda p, fp32: DeepSpeedCPUAdam(
        p, **ADAM, adamw_mode=False, bias_correction=False, fp32_optimizer_states=fp32
    ),
    "fused adam": lambda p, fp32: FusedAdam(p, **ADAM),
    "adagrad": lambda p, fp32: DeepSpeedCPUAdagrad(p, lr=0.1, weight_decay=0.1, fp32_optimizer_states=fp32),
    "cpu lion": lambda p, fp32: DeepSpeedCPULion(p, lr=1e-2, weight_decay=0.1, fp32_optimizer_states=fp32),
    "fused lion": lambda p, fp32: FusedLion(p, lr=1e-2, weight_decay=0.1),
}
SLOTS = ("exp_avg", "exp_avg_sq", "sum")


@pytest.mark.parametrize("fp32_states", [True, False])
@pytest.mark.parametrize("grad", ["like the weights", "fp32"])
@pytest.mark.parametrize("low", DTYPES[1:])
@pytest.mark.parametrize("name", NAMED)
def test_16_bit_parameters_run_on_the_kernels_and_are_rounded_once(
    name: str, low: torch.dtype, grad: str, *, fp32_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is the fp32 step from the 16-bit values, rounded; the kernel is called for each, in the dtypes that
    are there.
    """
    calls: list[tuple[torch.dtype, ...]] = []
    run = host._run

    def noted(op: Any, tensors: list[torch.Tensor], *rest: Any, **more: Any) -> None:
        calls.append(tuple(t.dtype for t in tensors))
        run(op, tensors, *rest, **more)

    monkeypatch.setattr(host, "_run", noted)
    param = torch.nn.Parameter(tensors()[0].to(low).view(17, 59))
    wide = torch.nn.Parameter(param.detach().float())
    param.grad_dtype = None  # a gradient may have another dtype
    grad_dtype = torch.float32 if grad == "fp32" else low
    mine, reference = NAMED[name]([param], fp32_states), NAMED[name]([wide], True)
    for step in range(4):
        param.grad = torch.randn(17, 59, generator=torch.Generator().manual_seed(step)).to(grad_dtype)
        wide.grad = param.grad.float()
        mine.step()
        moments = [mine.state[param][slot].dtype for slot in SLOTS if slot in mine.state[param]]
        assert set(moments) == {torch.float32 if fp32_states and "fused" not in name else low}
        assert calls == [(low, grad_dtype, *moments)]
        reference.step()
        with torch.no_grad():
            wide.copy_(wide.to(low))
            for slot in (s for s in SLOTS if s in mine.state[param]):
                reference.state[wide][slot].copy_(reference.state[wide][slot].to(moments[0]))
                assert torch.equal(mine.state[param][slot].float(), reference.state[wide][slot])
        assert torch.equal(param.detach().float(), wide.detach())
        calls.clear()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_adam_is_as_close_to_the_formula_as_torch(scale: float) -> None:
    """Measured against double precision: a 1 - beta taken in fp32 is 20 times further away."""
    draw = torch.Generator().manual_seed(1)
    start = 0.02 * torch.randn(20_000, generator=draw)
    gradients = [scale * torch.randn(20_000, generator=draw) for _ in range(5)]
    ours, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    found: dict[torch.dtype, torch.Tensor] = {}
    for dtype in (torch.float32, torch.float64):
        param = torch.nn.Parameter(start.to(dtype))
        reference = torch.optim.AdamW([param], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, foreach=False)
        for grad in gradients:
            param.grad = grad.to(dtype)
            reference.step()
        found[dtype] = param.detach().double()
    for step, grad in enumerate(gradients, start=1):
        host.adam_step(ours, grad, first, second, step=step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    error, theirs = ((x - found[torch.float64]).abs().mean() for x in (ours.double(), found[torch.float32]))
    assert error <= 1.2 * theirs, (error, theirs)


def test_not_a_number_goes_on_into_the_weight() -> None:
    for kernel in (adam, lambda v: host.lion_step(*v[:3], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)):
        values = tensors(8)
        values[1][3] = float("nan")
        kernel(values)
        assert values[0].isnan().tolist() == [i == 3 for i in range(8)]


# --- the same bits, however the work is cut ---


@pytest.mark.parametrize("count", [0, 1, 7, 64, 1003])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_pieces_and_unaligned_places_give_the_same_bits(count: int, offset: int) -> None:
    whole = tensors(count + offset)
    parts = [t.clone() for t in whole]
    adam(whole)
    for start, stop in ((0, offset), (offset, offset + count // 3), (offset + count // 3, offset + count)):
        adam([t[start:stop] for t in parts])
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_threads_do_not_change_a_bit(threads: None) -> None:
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        values = tensors(3 * host._GRAIN + 5)
        adam(values)
        results.append(values)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


DIGEST = """
import os
from deepspeed.checkpoint.format.checksum import _native
from tests.harness.aio import in_a_child
from tests.ops.test_cpu_optimizers import digest
for isa in ("plain", "avx2", "avx512"):
    os.environ["DS_CPU_ISA"] = isa
    assert in_a_child(lambda: print(digest(), flush=True)) == 0 and _native() is not None
"""


def run(warm: Warm, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it where no native library is loaded yet."""
    own = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run([warm.python, "-c", script], env=own, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done


def digest() -> str:
    """A hash over the results of every kernel and dtype, and a checksum."""
    found = hashlib.sha256(crc32c(torch.arange(100_003, dtype=torch.int32)).to_bytes(4, "big"))
    for weight, grad, moment in itertools.product(DTYPES, DTYPES, DTYPES):
        for step in (adam, lambda v: host.adagrad_step(v[0], v[1], v[3], rate=0.1, eps=1e-8, weight_decay=0.1)):
            values = tensors(weight=weight, grad=grad, moment=moment)
            step(values)
            found.update(b"".join(t.view(torch.uint8).numpy().tobytes() for t in values))
        values = tensors(weight=weight, grad=grad, moment=moment)
        host.lion_step(*values[:3], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, out=values[3])
        found.update(b"".join(t.view(torch.uint8).numpy().tobytes() for t in values))
    return found.hexdigest()


def test_every_vector_width_gives_the_same_bits(warm: Warm) -> None:
    assert run(warm, DIGEST).stdout.split() == [digest()] * 3


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor")
@pytest.mark.parametrize("name", ["g++", "clang++"])
def test_the_widest_loops_are_compiled_to_the_widest_registers(name: str, tmp_path: Path) -> None:
    """A compiler that does not know a word of the attribute may ignore all of it."""
    if shutil.which(name) is None:
        pytest.skip(f"no {name}")
    (source,), out = CPU_LION.files(), tmp_path / "lion.s"
    flags = ["-std=c++17", "-O3", *CPU_LION.flags, "-I", str(CPU_LION.folder()), "-S"]
    subprocess.run([name, *flags, str(source), "-o", str(out)], check=True, timeout=100)
    assert "%zmm" in out.read_text()


# --- what does not fit ---


@pytest.mark.parametrize(
    "broken",
    [
        lambda v: v.__setitem__(0, v[0].double()),
        lambda v: v.__setitem__(3, v[3].bfloat16()),
        lambda v: v.__setitem__(1, v[1][:-1]),
        lambda v: v.__setitem__(2, torch.zeros(2 * COUNT)[::2]),
        lambda v: v.__setitem__(3, v[3].to("meta")),
    ],
)
def test_tensors_that_do_not_fit_are_refused(broken: object) -> None:
    values = tensors()
    broken(values)
    with pytest.raises(ValueError, match="CPU kernel"):
        adam(values)


def test_a_forked_child_computes_too(threads: None) -> None:
    torch.set_num_threads(2)
    values, again = tensors(3 * host._GRAIN), tensors(3 * host._GRAIN)
    adam(values)
    expected = values[0].numpy().tobytes()

    def compute() -> None:
        adam(again)  # no torch operation here: OpenMP's own threads do not survive a fork
        assert again[0].numpy().tobytes() == expected

    assert in_a_child(compute) == 0


FALLBACK = """
import torch
from deepspeed.checkpoint.format.checksum import _native, crc32c
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
p = torch.nn.Parameter(torch.ones(8)); q = torch.nn.Parameter(torch.ones(8))
p.grad = q.grad = torch.arange(8.0)
a = DeepSpeedCPUAdam([p], lr=0.1); b = torch.optim.AdamW([q], lr=0.1, weight_decay=0)
for _ in range(3): a.step(); b.step()
assert torch.allclose(p, q), (p, q)
print(crc32c(torch.arange(100_003, dtype=torch.int32)))
assert _native() is None
"""


def test_without_a_compiler_torch_does_the_work_and_one_line_says_so(tmp_path: Path, warm: Warm) -> None:
    cache = str(tmp_path / "cache")
    done = run(warm, FALLBACK, CXX=str(tmp_path / "none"), PATH=str(tmp_path), TORCH_EXTENSIONS_DIR=cache)
    assert done.stdout.splitlines()[-1] == str(crc32c(torch.arange(100_003, dtype=torch.int32)))
    said = done.stdout + done.stderr
    assert said.count("cpu_adam") == said.count("cpu_checksum") == 1


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages")
def test_moments_in_host_memory_ask_for_huge_pages() -> None:
    param = torch.nn.Parameter(torch.zeros(4 << 20))
    param.grad = torch.ones_like(param)
    optimizer = DeepSpeedCPUAdam([param])
    optimizer.step()
    flags: list[str] = []
    middles = [optimizer.state[param][slot].data_ptr() + 2 * param.numel() for slot in ("exp_avg", "exp_avg_sq")]
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            start, stop = (int(x, 16) for x in head.split("-"))
        elif head == "VmFlags:":
            flags += [line for middle in middles if start <= middle < stop]
    assert len(flags) == 2 and all(" hg" in line for line in flags)


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_steps_are_counted_in_fp32_whatever_the_default_dtype(cls: type[torch.optim.Optimizer]) -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = cls([weight])
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(300):  # 256 + 1 is 256 in bf16
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert int(optimizer.state[weight]["step"]) == 300


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_a_native_step_is_seen_by_autograd(cls: type[torch.optim.Optimizer]) -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = cls([weight], lr=0.1)
    loss = (weight * weight).sum()
    weight.grad = torch.ones(8)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_pool_of_threads_serves_all_sizes(threads: None) -> None:
    torch.set_num_threads(4)
    for pieces in (2, 3, 4):
        adam(tensors(pieces * host._GRAIN))
    names = {t.name.rsplit("_", 1)[0] for t in threading.enumerate() if t.name.startswith("deepspeed-4-threads")}
    assert len(names) == 1


def test_all_kernels_are_built() -> None:
    assert all(try_load(op) is not None and built(op) is not None for op in (CPU_ADAM, CPU_ADAGRAD, CPU_LION))
