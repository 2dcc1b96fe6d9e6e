"""The CUDA kernels of Adam, Lion and LAMB compute what the host kernels and torch compute, whatever the dtypes, sizes
and alignment.

The tests that take ``place`` also run in tests/ops/test_cuda_sources.py, on the same sources compiled for the host.
"""

import itertools
from collections.abc import Callable

import pytest
import torch

from deepspeed.accelerator.native.build import try_load
from deepspeed.accelerator.native.spec import CPU_ADAM, CPU_LION, FUSED_ADAM, FUSED_LAMB, FUSED_LION
from deepspeed.optim import cuda, host
from deepspeed.optim.rules import FusedAdam, FusedLamb, FusedLion, Lamb

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(600),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 1003, 8192, 8193, 20_000, 65_536)  # around the elements of a block, and no multiple of a vector
ADAM = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
LION = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
LAMB = {**ADAM, "min_coeff": 0.01, "max_coeff": 10.0}

Columns = list[list[torch.Tensor]]
Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]
FP32: Dtypes = (torch.float32,) * 3
# Parameters and gradients that there are kernels for: 16-bit parameters have gradients like them, or in fp32.
TOGETHER = [(p, g) for p, g in itertools.product(DTYPES, DTYPES) if p is torch.float32 or g in (torch.float32, p)]

needs_host_kernels = pytest.mark.skipif(
    torch.cuda.is_available() and (try_load(CPU_ADAM) is None or try_load(CPU_LION) is None),
    reason="no C++ compiler for the host kernels",
)


@pytest.fixture
def place() -> str:
    for op in (FUSED_ADAM, FUSED_LION, FUSED_LAMB):
        assert cuda.usable(op, [[torch.ones(1, device="cuda")]] * 3), op
    return "cuda"


def draw(
    sizes: tuple[int, ...] = SIZES, dtypes: Dtypes = FP32, *, place: str = "cpu", offsets: tuple[int, ...] = (0,) * 4
) -> Columns:
    """Parameters, gradients and two moments, each column ``offsets`` elements into its memory: not aligned."""
    columns: Columns = [[], [], [], []]
    for seed, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed)
        param, grad, first = (torch.randn(size, generator=generator) for _ in range(3))
        values = (param, grad, first, first.square())
        for column, value, dtype, offset in zip(columns, values, (*dtypes, dtypes[2]), offsets, strict=True):
            memory = torch.empty(size + offset, dtype=dtype, device=place)
            column.append(memory[offset:].copy_(value))
    return columns


def copies(columns: Columns, place: str) -> Columns:
    return [[t.to(place, copy=True) for t in column] for column in columns]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


def host_adam(columns: Columns, *, step: int, **settings: object) -> None:
    for row in zip(*columns, strict=True):
        host.adam_step(*row, step=step, **settings)


# --- the arithmetic ---


@needs_host_kernels
@pytest.mark.parametrize(("decoupled", "bias_correction"), list(itertools.product([True, False], repeat=2)))
def test_adam_equals_the_host_kernel_bit_by_bit(place: str, *, decoupled: bool, bias_correction: bool) -> None:
    theirs = draw()
    mine = copies(theirs, place)
    for step in range(1, 6):
        settings = {
            **ADAM,
            "decoupled": decoupled,
            "bias_correction": bias_correction,
            "grad_scale": 0.25,
            "step": step,
        }
        host_adam(theirs, **settings)
        cuda.adam_step(*mine, **settings)
    for found, expected in zip(mine, theirs, strict=True):
        assert equal(found, expected)


@needs_host_kernels
def test_lion_equals_the_host_kernel_bit_by_bit(place: str) -> None:
    theirs = draw()
    theirs[1][2][:5] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")])
    theirs[2][2][:2] = 0.0
    mine = copies(theirs, place)
    for _ in range(4):
        for row in zip(*theirs[:3], strict=True):
            host.lion_step(*row, **LION, grad_scale=0.5)
        cuda.lion_step(*mine[:3], **LION, grad_scale=0.5)
    for found, expected in zip(mine[:3], theirs[:3], strict=True):
        assert all(torch.equal(a.cpu().nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_follows_torch(place: str, kind: type[torch.optim.Optimizer]) -> None:
    params, *_ = draw()
    theirs = [torch.nn.Parameter(p.to(place, copy=True)) for p in params]
    mine = copies([params], place)[0]
    first, second = ([torch.zeros_like(p) for p in mine] for _ in range(2))
    reference = kind(theirs, **ADAM, foreach=False)
    for step in range(1, 11):
        for seed, param in enumerate(theirs):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + seed)).to(place)
        cuda.adam_step(
            mine, [p.grad for p in theirs], first, second, step=step, decoupled=kind is torch.optim.AdamW, **ADAM
        )
        reference.step()
    for found, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)


def lamb_pair(
    place: str, dtype: torch.dtype, **settings: object
) -> tuple[Columns, list[torch.Tensor], list[torch.nn.Parameter], Lamb]:
    """Three steps of the kernel, its last ratios, and the same by deepspeed.optim.rules in fp32 on the host."""
    mine = draw(dtypes=(dtype, dtype, torch.float32), place=place)
    mine[2], mine[3] = ([torch.zeros_like(t) for t in column] for column in mine[2:])
    mine[0][1].zero_()  # a norm of zero
    theirs = [torch.nn.Parameter(p.to("cpu", torch.float32, copy=True)) for p in mine[0]]
    reference = Lamb(theirs, **{**LAMB, **settings})
    ratios: list[torch.Tensor] = []
    for step in range(1, 4):
        for param, grad in zip(theirs, mine[1], strict=True):
            param.grad = grad.float().cpu()
        ratios = cuda.lamb_step(*mine, step=step, **{**LAMB, **settings})
        reference.step()
    return mine, ratios, theirs, reference


@pytest.mark.parametrize("eps_inside_sqrt", [False, True])
@pytest.mark.parametrize(("min_coeff", "max_coeff"), [(0.01, 10.0), (0.9, 0.95), (20.0, 30.0)])
def test_lamb_follows_the_host_class(place: str, min_coeff: float, max_coeff: float, *, eps_inside_sqrt: bool) -> None:
    mine, ratios, theirs, reference = lamb_pair(
        place, torch.float32, min_coeff=min_coeff, max_coeff=max_coeff, eps_inside_sqrt=eps_inside_sqrt
    )
    torch.testing.assert_close([float(r) for r in ratios], reference.get_lamb_coeffs(), rtol=1e-5, atol=0)
    for found, expected in zip(mine[0], theirs, strict=True):
        torch.testing.assert_close(found.cpu(), expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_lamb_of_16_bit_parameters(place: str, dtype: torch.dtype) -> None:
    mine, _, theirs, _ = lamb_pair(place, dtype)
    for found, expected in zip(mine[0], theirs, strict=True):
        torch.testing.assert_close(found.float().cpu(), expected.detach(), rtol=0.02, atol=0.02)


def test_lamb_repeats_its_bits_and_writes_the_rounded_weights(place: str) -> None:
    results = []
    for _ in range(2):
        columns = draw((3_000_001, 5, 70_000), place=place)
        outs = [torch.empty_like(p, dtype=torch.bfloat16) for p in columns[0]]
        ratios = cuda.lamb_step(*columns, step=2, outs=outs, **LAMB)
        assert equal(outs, [p.bfloat16() for p in columns[0]])
        results.append([*columns[0], *columns[2], *columns[3], *ratios])
    assert equal(*results)


# --- dtypes, memory, numbers ---


@needs_host_kernels
@pytest.mark.parametrize(("param", "grad"), TOGETHER)
def test_every_dtype_is_the_fp32_rule_with_rounded_inputs_and_outputs(
    place: str, param: torch.dtype, grad: torch.dtype
) -> None:
    for moment, out in itertools.product({torch.float32, param}, (None, *DTYPES)):
        low = draw((1003, 9001), (param, grad, moment))
        wide = [[t.float().clone() for t in column] for column in low]
        mine = copies(low, place)
        outs = None if out is None else [torch.empty_like(p, dtype=out) for p in mine[0]]
        cuda.adam_step(*mine, step=3, outs=outs, **ADAM)
        host_adam(wide, step=3, **ADAM)
        for found, expected, dtype in zip(mine, wide, (param, grad, moment, moment), strict=True):
            assert equal(found, [t.to(dtype) for t in expected]), (moment, out)
        assert outs is None or equal(outs, [t.to(out) for t in wide[0]])


@pytest.mark.parametrize("step", [cuda.adam_step, cuda.lion_step, cuda.lamb_step])
def test_dtypes_that_no_kernel_is_compiled_for_are_refused_and_change_nothing(
    place: str, step: Callable[..., object]
) -> None:
    settings = LION if step is cuda.lion_step else {"step": 2, **(ADAM if step is cuda.adam_step else LAMB)}
    known = [(p, g, m) for p, g in TOGETHER for m in {torch.float32, p}]
    for dtypes in set(itertools.product(DTYPES, repeat=3)) - set(known):
        columns = draw((1003,), dtypes, place=place)[: 3 if step is cuda.lion_step else 4]
        before = copies(columns, place)
        with pytest.raises(ValueError, match="in fp32 or the parameter's dtype, not torch"):
            step(*columns, **settings)
        assert all(map(equal, columns, before))
    for dtypes in known:
        step(*draw((1003,), dtypes, place=place)[: 3 if step is cuda.lion_step else 4], **settings)


def test_a_class_updates_what_no_kernel_is_compiled_for_with_torch(place: str) -> None:
    columns = draw((1003,), (torch.float32, torch.float32, torch.bfloat16), place=place)
    assert not cuda._compiled(*(column[0] for column in columns))
    param = torch.nn.Parameter(columns[0][0].clone())
    optimizer = FusedAdam([param], lr=1e-2, weight_decay=0.0)
    optimizer.state[param] = {
        "step": torch.ones((), device=place),
        "exp_avg": columns[2][0],
        "exp_avg_sq": columns[3][0],
    }
    param.grad = columns[1][0]
    optimizer.step()
    assert float(optimizer.state[param]["step"]) == 2 and not torch.equal(param, columns[0][0])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_lion_in_16_bits(place: str, dtype: torch.dtype) -> None:
    low = draw(dtypes=(dtype, dtype, dtype), place=place)
    wide = [[t.float() for t in column] for column in low]
    outs = [torch.empty_like(p) for p in low[0]]
    cuda.lion_step(*low[:3], outs=outs, **LION)
    cuda.lion_step(*wide[:3], **LION)
    assert (
        equal(low[0], [t.to(dtype) for t in wide[0]])
        and equal(low[2], [t.to(dtype) for t in wide[2]])
        and equal(outs, low[0])
    )


@pytest.mark.parametrize("step", [cuda.adam_step, cuda.lion_step, cuda.lamb_step])
@pytest.mark.parametrize(
    "dtypes", [FP32, (torch.float32, torch.bfloat16, torch.float32), (torch.bfloat16,) * 3], ids=str
)
def test_alignment_changes_no_bit(place: str, step: Callable[..., object], dtypes: Dtypes) -> None:
    def run(*offsets: int) -> list[torch.Tensor]:
        columns = draw(dtypes=dtypes, place=place, offsets=offsets[:4])
        outs = [
            torch.empty(p.numel() + offsets[4], dtype=torch.float16, device=place)[offsets[4] :] for p in columns[0]
        ]
        if step is cuda.lion_step:
            step(*columns[:3], outs=outs, **LION)
        else:
            step(*columns, step=2, outs=outs, **(ADAM if step is cuda.adam_step else LAMB))
        return [*columns[0], *columns[2], *columns[3], *outs]

    # LAMB's threads add up other elements then, so that the norms and the ratio may round differently
    near = {} if step is cuda.lamb_step else {"rtol": 0.0, "atol": 0.0}
    aligned = run(0, 0, 0, 0, 0)
    for offsets in [(3,) * 5, *(tuple(int(i == one) for i in range(5)) for one in range(5))]:
        torch.testing.assert_close(run(*offsets), aligned, **near)


def test_hundreds_of_tensors_of_mixed_dtypes_and_none_of_length_zero_hurts(place: str) -> None:
    sizes = tuple((17 * i) % 411 for i in range(200))
    assert 0 in sizes
    mine = draw(sizes, place=place)
    mine[1] = [g.bfloat16() if i % 3 == 0 else g for i, g in enumerate(mine[1])]
    single = copies(mine, place)
    steps = [torch.full((), float(1 + i % 5), device=place) for i in range(len(sizes))]
    cuda.adam_step(*mine, step=steps, **ADAM)
    for row, step in zip(zip(*single, strict=True), steps, strict=True):
        cuda.adam_step(*([t] for t in row), step=[step], **ADAM)
    assert equal(mine[0], single[0]) and equal(mine[3], single[3])
    ratios = cuda.lamb_step(*mine, step=2, **LAMB)
    alone = [cuda.lamb_step(*([t] for t in row), step=2, **LAMB)[0] for row in zip(*single, strict=True)]
    assert equal(ratios, alone) and equal(mine[0], single[0])
    cuda.adam_step([], [], [], [], step=1, **ADAM)


@pytest.mark.parametrize("step", [cuda.adam_step, cuda.lion_step, cuda.lamb_step])
def test_an_overflow_changes_nothing(place: str, step: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    columns = draw(place=place)
    before = copies(columns, place)
    outs = [torch.full_like(p, 7.0) for p in columns[0]]
    lion = step is cuda.lion_step
    settings = {
        "found_inf": torch.ones((), device=place),
        "outs": outs,
        **(LION if lion else LAMB if step is cuda.lamb_step else ADAM),
    }
    given = columns[:3] if lion else columns
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", torch.rand)  # LAMB must not use sums that it did not write
        ratios = step(*given, **settings, **({} if lion else {"step": 2})) or []
    assert all(float(ratio) == 1.0 for ratio in ratios)
    for found, expected in zip(columns, before, strict=True):
        assert equal(found, expected)
    assert all(bool((o == 7.0).all()) for o in outs)
    settings["found_inf"].zero_()
    step(*given, **settings, **({} if lion else {"step": 2}))
    assert equal(outs, columns[0]) and not equal(columns[0], before[0])


@pytest.mark.parametrize("bias_correction", [True, False])
def test_numbers_on_the_device_are_those_of_the_host(place: str, *, bias_correction: bool) -> None:
    known, read = (draw(place=place) for _ in range(2))
    for step in (1, 2, 1000):
        settings = {**ADAM, "bias_correction": bias_correction}
        cuda.adam_step(*known, step=step, grad_scale=0.125, **settings)
        numbers = {
            name: torch.tensor(float(value), device=place)
            for name, value in (("step", step), ("lr", 1e-2), ("grad_scale", 0.125))
        }
        cuda.adam_step(*read, **{**settings, **numbers, "step": [numbers["step"]] * len(SIZES)})
    for found, expected in zip(read[0], known[0], strict=True):
        # the rate is rounded to fp32 on the way there
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_default_dtype_changes_no_bit(place: str) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        adam, lamb = (draw(SIZES * 4, place=place) for _ in range(2))
        steps = [torch.tensor(3.0, device=place)] * len(adam[0])
        torch.set_default_dtype(dtype)
        try:
            cuda.adam_step(*adam, step=steps, **ADAM)
            ratios = cuda.lamb_step(*lamb, step=steps, **LAMB)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([tensor for column in (*adam, *lamb, ratios) for tensor in column])
    assert found[0][-1].dtype is found[1][-1].dtype is torch.float32
    assert equal(*found)


# --- the classes ---


@pytest.mark.parametrize(
    "make",
    [
        lambda p: FusedAdam(p, **ADAM),
        lambda p: FusedAdam(p, **ADAM, adam_w_mode=False, bias_correction=False),
        lambda p: FusedLion(p, **LION),
        lambda p: FusedLamb(p, **LAMB),
    ],
    ids=["adamw", "adam", "lion", "lamb"],
)
def test_the_named_classes_run_on_the_kernels(
    place: str, make: Callable[[object], torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    submit = cuda._submit
    monkeypatch.setattr(cuda, "_submit", lambda op, *rest: (calls.append(op.name), submit(op, *rest))[1])
    ours = [torch.nn.Parameter(p.view(-1)) for p in draw(place=place)[0]]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    mine, reference = (
        make([{"params": ours[:3]}, {"params": ours[3:], "lr": 1e-3}]),
        make([{"params": theirs[:3]}, {"params": theirs[3:], "lr": 1e-3}]),
    )
    for step in range(1, 5):
        for seed, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(100 * step + seed)).to(place)
            other.grad = one.grad.clone()
        mine.step()
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "usable", lambda op, tensors: False)
            patch.setattr(host, "usable", lambda op, *tensors: False)
            reference.step()
    assert len(calls) == 8
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if isinstance(mine, FusedLamb):
        torch.testing.assert_close(mine.get_lamb_coeffs(), reference.get_lamb_coeffs(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("cls", [FusedAdam, FusedLion, FusedLamb])
def test_the_named_classes_write_the_rounded_weights(
    place: str, cls: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    params = [torch.nn.Parameter(p) for p in draw(place=place)[0]]
    outputs = {p: torch.full_like(p, 7.0, dtype=dtype, requires_grad=False) for p in params[1:]}  # one has none
    for param in params[:-1]:
        param.grad = torch.ones_like(param)
    optimizer = cls(params, lr=0.1)
    with optimizer.writing_outputs(outputs) as written:
        optimizer.step()
    assert [p in written for p in params] == [False, *[True] * (len(params) - 2), False]
    assert all(torch.equal(out, p.detach().to(dtype)) for p, out in outputs.items() if p in written)
    assert bool((outputs[params[-1]] == 7.0).all())
    if cls is FusedAdam:  # where the device may find an overflow, its kernel may write nothing
        optimizer.found_inf, optimizer.grad_scale = torch.zeros((), device=place), torch.ones((), device=place)
        with optimizer.writing_outputs(outputs) as written:
            optimizer.step()
        assert not written


def test_a_grad_scaler_is_heard(place: str) -> None:
    param = torch.nn.Parameter(torch.ones(5, device=place))
    plain = torch.nn.Parameter(torch.ones(5, device=place))
    optimizer, reference = FusedAdam([param], **ADAM), FusedAdam([plain], **ADAM)
    optimizer.grad_scale, optimizer.found_inf = torch.full((), 1024.0, device=place), torch.zeros((), device=place)
    for overflow in (0.0, 1.0, 0.0):
        optimizer.found_inf.fill_(overflow)
        param.grad, plain.grad = torch.full_like(param, 1024.0), torch.ones_like(plain)
        optimizer.step()
        if not overflow:
            reference.step()
    assert equal([param.detach()], [plain.detach()]) and float(optimizer.state[param]["step"]) == 2.0


@pytest.mark.parametrize("cls", [FusedAdam, FusedLion])
def test_what_the_device_leaves_out_changes_nothing_and_counts_for_nothing(
    place: str, cls: type[FusedAdam | FusedLion]
) -> None:
    """The engine's way: steps that are left out are as if they had never been, and so are outputs."""
    param, plain = (torch.nn.Parameter(torch.ones(9, device=place)) for _ in range(2))
    optimizer, reference = cls([param], lr=0.1), cls([plain], lr=0.1)
    out, expected = (torch.ones(9, dtype=torch.bfloat16, device=place) for _ in range(2))
    for bad in (1.0, 0.0, 1.0, 0.0):
        param.grad, plain.grad = torch.full_like(param, float("nan") if bad else 2.0), torch.full_like(plain, 2.0)
        with optimizer.writing_outputs({param: out}, skip=torch.full((), bad, device=place)) as written:
            optimizer.step()
        assert param in written
        if not bad:
            with reference.writing_outputs({plain: expected}):
                reference.step()
        assert equal([param.detach(), out], [plain.detach(), expected])
    for name, value in reference.state[plain].items():
        assert torch.equal(optimizer.state[param][name], value), name


# --- what is refused ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda columns: columns[1].__setitem__(0, torch.ones(5)), "contiguous tensors of 4 elements"),
        (lambda columns: columns[1].__setitem__(0, torch.ones(8)[::2]), "strides"),
        (lambda columns: columns[1].__setitem__(0, torch.ones(4, dtype=torch.float64)), "float64"),
        (lambda columns: columns[3].__setitem__(0, torch.ones(4, dtype=torch.float16)), "one dtype"),
        (lambda columns: columns[1].pop(), "zip"),
    ],
    ids=["size", "strides", "dtype", "moments", "count"],
)
def test_tensors_that_do_not_fit(place: str, change: Callable[[Columns], None], message: str) -> None:
    columns = [[torch.ones(4)] for _ in range(4)]
    change(columns)
    with pytest.raises(ValueError, match=message):
        cuda.adam_step(*copies_of_views(columns, place), step=1, **ADAM)


def copies_of_views(columns: Columns, place: str) -> Columns:
    return [
        [t.to(place) if t.is_contiguous() else torch.ones(2 * t.numel(), device=place)[::2] for t in column]
        for column in columns
    ]


def test_a_step_must_be_on_the_device_in_fp32(place: str) -> None:
    with pytest.raises(ValueError, match="fp32 tensors of one element"):
        cuda.adam_step(*draw((4,), place=place), step=[torch.ones((), dtype=torch.int64, device=place)], **ADAM)


def test_host_tensors_are_refused() -> None:
    columns = draw((4,))
    assert not cuda.usable(FUSED_ADAM, columns)
    for call in (
        lambda: cuda.adam_step(*columns, step=1, **ADAM),
        lambda: cuda.lion_step(*columns[:3], **LION),
        lambda: cuda.lamb_step(*columns, step=1, **LAMB),
    ):
        with pytest.raises(ValueError, match="on one CUDA device, not .* on cpu"):
            call()


# --- the device only ---


def test_a_captured_step_counts_on(place: str) -> None:
    given, expected = (draw(place=place) for _ in range(2))
    step, found_inf = torch.zeros((), device=place), torch.zeros((), device=place)
    lr = torch.full((), 1e-2, device=place)
    settings = {**ADAM, "lr": lr, "found_inf": found_inf}

    def update() -> None:
        step.add_(1.0 - found_inf)
        cuda.adam_step(*given, step=[step] * len(SIZES), **settings)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        update()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    for replay in range(4):
        found_inf.fill_(float(replay == 2))
        lr.fill_(1e-2 / (replay + 1))
        graph.replay()
    assert float(step) == 4.0
    for number, rate in enumerate((1e-2, 1e-2, 5e-3, 2.5e-3), start=1):
        cuda.adam_step(*expected, step=number, **{**ADAM, "lr": rate})
    for found, other in zip(given[0], expected[0], strict=True):
        torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-6)


def test_the_current_stream_is_used(place: str) -> None:
    columns, expected = (draw((1 << 20,), place=place) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        columns[1][0].mul_(2.0)
        cuda.adam_step(*columns, step=1, **ADAM)
        columns[0][0].mul_(3.0)
    torch.cuda.current_stream().wait_stream(side)
    expected[1][0].mul_(2.0)
    cuda.adam_step(*expected, step=1, **ADAM)
    assert equal(columns[0], [expected[0][0] * 3.0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_on_two_devices() -> None:
    mine = [[*one, *other] for one, other in zip(draw(place="cuda:0"), draw(place="cuda:1"), strict=True)]
    cuda.adam_step(*mine, step=1, **ADAM)
    half = len(SIZES)
    assert equal(mine[0][:half], mine[0][half:]) and torch.cuda.current_device() == 0
