"""Mixed precision: bf16 and fp16 with fp32 masters, loss scales, skipped steps, and the dtype that travels."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.client.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.tools.checkpoint.cli import main as tool
from deepspeed.tools.verify.grads import Cell, full_gradients, full_parameters, run_cell, scaled_error
from deepspeed.tools.verify.models import IN_FEATURES, Stack, seeded
from deepspeed.tools.verify.reference import trainable
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.zero import build
from tests.harness.cases import case_named
from tests.harness.faults import Faults
from tests.harness.lockstep import lockstep
from tests.harness.pool import RankPool
from tests.harness.reference16 import lowered, rounded, train_16bit
from tests.harness.spy import CollectiveSpy
from tests.harness.training import ADAMW, STAGES, here, make_config, outcome, start

pytestmark = pytest.mark.timeout(120)

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 128.0}}
# torch's own Adam as in the reference: another last place of a master can round to another 16-bit weight
EXACT = {
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "AdamW", "params": {**ADAMW["params"], "torch_adam": True}},
}


# what is configured, and what is meant
LOW: dict[str, tuple[dict[str, Any], torch.dtype, float]] = {
    "bf16": (BF16, torch.bfloat16, 1.0),
    "fp16": (FP16, torch.float16, 128.0),
}
OF_BUFFERS = ("rotary", "batch_norm", "constants")


def compare_16bit(name: str, stage: int, precision: str, extra: dict[str, Any]) -> dict[str, float]:
    """Train a case in 16 bits with the engine and return the largest errors against :func:`train_16bit`."""
    config, dtype, scale = LOW[precision]
    case = rounded(case_named(name), dtype)
    expected = train_16bit(case, world=dist.get_world_size(), dtype=dtype, scale=scale)
    clip_and_accumulate = {"gradient_clipping": case.clipping, "gradient_accumulation_steps": case.accumulation}
    engine = start(case.build().train(), make_config(stage, **clip_and_accumulate, **config, **extra))
    params = trainable(engine.module)
    assert {n: p.dtype for n, p in params.items()} == {
        n: p.dtype for n, p in trainable(lowered(case.build(), dtype)).items()
    }
    error = {"loss": 0.0, "grad": 0.0, "norm": 0.0, "master": 0.0, "weight": 0.0}

    def add(kind: str, ours: torch.Tensor, reference: torch.Tensor) -> None:
        error[kind] = max(error[kind], scaled_error(ours, reference))

    for step in range(len(expected.norms)):
        for micro in range(case.accumulation):
            (loss,) = case.seeded_loss(engine, here(step, micro))
            add("loss", loss.detach(), torch.tensor(expected.losses[step][dist.get_rank(), micro]))
            engine.backward(loss)
            if micro == case.accumulation - 1:
                for key, grad in full_gradients(params).items():
                    add("grad", grad, expected.grads[step][key])
            engine.step()
        add("norm", torch.tensor(float(engine.get_global_grad_norm())), torch.tensor(expected.norms[step]))
    weights = full_parameters(engine.module)
    for key, param in params.items():
        master = safe_get_full_fp32_param(param)
        add("master", master, expected.masters[key])
        add("weight", weights[key].float(), master.to(param.dtype).float())
    if dist.get_world_size() == 1:
        own = dict(engine.module.named_buffers())
        same = [own[n].dtype is b.dtype and torch.equal(own[n], b) for n, b in expected.buffers.items()]
        error["buffers"] = 1.0 - sum(same) / max(1, len(same))
    engine.destroy()
    return error


@pytest.mark.in_make_test(
    "plain-bf16-0",
    "accumulation-bf16-3",
    "unused-bf16-3",
    "batch_norm-bf16-0",
    "plain-fp16-3",
    "accumulation-fp16-3",
    "clipping-fp16-3",
)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bf16") for name in ("plain", "accumulation", "clipping", "tied", "unused", *OF_BUFFERS)),
        *((name, "fp16") for name in ("plain", "accumulation", "clipping")),
    ],
)
def test_exact_reduction_equals_the_reference(pool2: RankPool, name: str, dtype: str, stage: int) -> None:
    """In fp16 with a static scale."""
    for error in pool2.run(compare_16bit, name, stage, dtype, EXACT):
        assert max(error.values()) <= 1e-6, error


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", OF_BUFFERS)
def test_buffers_are_not_rounded_and_running_statistics_move(pool1: RankPool, name: str, dtype: str) -> None:
    """On one rank, which has seen the same batches as the plain model."""
    (error,) = pool1.run(compare_16bit, name, 3, dtype, EXACT)
    assert error["buffers"] == 0.0 and max(error.values()) <= 1e-6, error


class Buffered(nn.Module):
    """Constructors of every kind, in buffers that are saved and in one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 1)
        self.register_buffer("third", torch.full((6,), 1 / 3))
        self.register_buffer("tenth", torch.ones(6) * 0.1, persistent=False)
        self.register_buffer("inv_freq", 1.0 / (10000.0 ** (torch.arange(0, 12, 2).float() / 12)))
        self.register_buffer("wide", torch.eye(2, dtype=torch.float64) / 3)
        self.register_buffer("narrow", torch.zeros(3, dtype=torch.float16) + 0.1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)).float().square().mean()


def buffers_along_the_way(stage: int, folder: str, sharded: bool) -> list[str]:
    """Where a buffer was not what the model's code makes of it: built, trained, saved, loaded, exported."""
    plain = dict(Buffered().named_buffers())
    config = make_config(stage, **BF16)

    def made() -> Any:
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=sharded):
            model = Buffered()
        return start(model, config)

    wrong: list[str] = []

    def compare(when: str, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
        wrong.extend(
            f"{when}: {n} {found[n].dtype}"
            for n, b in expected.items()
            if n in found and not (found[n].dtype is b.dtype and torch.equal(found[n], b))
        )

    engine = made()
    compare("built", plain, dict(engine.module.named_buffers()))
    weights = {n: p.dtype for n, p in engine.module.named_parameters()}
    wrong += [
        f"{n} {d}" for n, d in weights.items() if d is not (torch.float32 if n.startswith("norm.") else torch.bfloat16)
    ]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    engine.backward(engine(x))
    engine.step()
    trained = {n: b.clone() for n, b in engine.module.named_buffers()}
    mean = plain["norm.running_mean"] * 0.9 + x.float().mean(0) * 0.1
    wrong += [] if torch.allclose(trained["norm.running_mean"], mean, atol=1e-6) else ["the running mean did not move"]
    engine.save_checkpoint(folder)
    whole = engine._zero3_consolidated_16bit_state_dict() if stage == 3 else None
    compare("consolidated", trained, whole or {})
    engine.destroy()
    out = f"{folder}-out"
    if dist.get_rank() == 0:
        compare(
            "zero_to_fp32",
            {n: b.float() if n == "narrow" else b for n, b in trained.items()},
            get_fp32_state_dict_from_zero_checkpoint(folder),
        )
        tag = f"{folder}/global_step1"
        wrong += ["export"] * tool(["export", tag, out, "--format", "deepspeed", "--stage", str(stage), "--world", "2"])
    dist.barrier()
    for source in (folder, out):
        engine = made()
        path, _ = engine.load_checkpoint(source, tag="global_step1")
        wrong += [] if path else [f"nothing loaded from {source}"]
        compare(
            f"loaded from {source}",
            {n: b for n, b in trained.items() if n != "tenth"},
            dict(engine.module.named_buffers()),
        )
        engine.destroy()
    return wrong


@pytest.mark.parametrize(("stage", "sharded"), [(0, False), (2, False), (3, False), (3, True)])
def test_a_buffer_keeps_its_dtype_and_every_bit(pool2: RankPool, tmp_path: Path, stage: int, sharded: bool) -> None:
    assert pool2.run(buffers_along_the_way, stage, str(tmp_path / "saved"), sharded) == [[], []]


def _verified(name: str, config: dict[str, Any], *, cast: bool) -> str:
    """What ``ds_verify grads`` says of the dtypes; ``cast``: as if buffers were rounded on the way."""
    honest = build._move_buffers

    def rounding(model: nn.Module, mesh: Any, rules: Any) -> None:
        honest(model, mesh, replace(rules, buffer_dtype=torch.bfloat16))

    build._move_buffers = rounding if cast else honest
    try:
        return outcome(lambda: run_cell(Cell(name, stage=3, config=config), steps=1, case=case_named(name)))
    finally:
        build._move_buffers = honest


@pytest.mark.in_make_test("bf16")
@pytest.mark.parametrize("config", [{}, BF16], ids=["fp32", "bf16"])
def test_the_gate_sees_a_changed_dtype(pool2: RankPool, config: dict[str, Any]) -> None:
    for said in pool2.run(_verified, "rotary", config, cast=True):
        assert "InvalidStateError" in said and "inv_freq from torch.float32 to torch.bfloat16" in said
    allowed = {**BF16, "data_types": {"buffer_dtype": "bf16"}}
    for name, told in (("rotary", config), ("batch_norm", config), ("rotary", allowed), ("batch_norm", allowed)):
        assert pool2.run(_verified, name, told, cast=False) == ["", ""]


def _as_told(dtype: str) -> dict[str, torch.dtype]:
    engine = start(Buffered(), make_config(3, **BF16, data_types={"buffer_dtype": dtype}))
    engine.backward(engine(torch.ones(4, 6).bfloat16()))
    found = {n: t.dtype for n, t in (*engine.module.named_buffers(), *engine.module.named_parameters())}
    engine.destroy()
    return found


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_buffer_dtype_casts_floating_buffers_and_batch_norms_with_them(
    pool2: RankPool, name: str, dtype: torch.dtype
) -> None:
    for found in pool2.run(_as_told, name):
        assert found.pop("linear.weight") is found.pop("linear.bias") is torch.bfloat16
        assert found.pop("steps") is found.pop("norm.num_batches_tracked") is torch.int64
        assert set(found.values()) == {dtype}


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_default_reduction_stays_within_bf16_rounding(pool2: RankPool, stage: int) -> None:
    for error in pool2.run(compare_16bit, "accumulation", stage, "bf16", {}):
        assert error["weight"] == 0.0, error
        assert error["grad"] <= 1e-2 and error["master"] <= 1e-3, error


def _gradient_traffic(stage: int, extra: dict[str, Any]) -> set[torch.dtype]:
    case = rounded(case_named("plain"), torch.bfloat16)
    engine = start(case.build(), make_config(stage, **extra))
    (loss,) = case.seeded_loss(engine, here(0))
    with CollectiveSpy() as spy:
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return spy.dtypes()


@pytest.mark.in_make_test("None-expected0-0", "fp32-expected2-1", "bf16-expected1-2", "bf16-expected1-3")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("chosen", "expected"), [(None, torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_gradients_travel_in_the_communication_dtype(
    pool2: RankPool, stage: int, chosen: str | None, expected: torch.dtype
) -> None:
    for seen in pool2.run(_gradient_traffic, stage, {**BF16, "communication_data_type": chosen}):
        # Where weights are sharded or updated in shards, they travel too, in their own dtype.
        assert seen == ({expected} if stage == 0 else {expected, torch.bfloat16})


@pytest.mark.parametrize("zero", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=["mics", "hpz"])
@pytest.mark.parametrize(("chosen", "expected"), [(None, torch.bfloat16), ("fp32", torch.float32)])
def test_they_do_so_on_every_axis(
    pool4: RankPool, zero: dict[str, int], chosen: str | None, expected: torch.dtype
) -> None:
    extra = {**BF16, "communication_data_type": chosen, "zero": zero}
    for seen in pool4.run(_gradient_traffic, 3, extra):
        assert seen == {expected, torch.bfloat16}  # weights travel too


def _accumulated_in(stage: int, accumulate: str) -> bool:
    """Whether every accumulated gradient is a bf16 number."""
    case = rounded(case_named("accumulation"), torch.bfloat16)
    extra = {**BF16, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": accumulate}}
    engine = start(case.build(), make_config(stage, gradient_accumulation_steps=case.accumulation, **extra))
    for micro in range(case.accumulation):
        engine.backward(case.seeded_loss(engine, here(0, micro))[0])
        if micro < case.accumulation - 1:
            engine.step()
    grads = full_gradients(trainable(engine.module))
    engine.step()
    engine.destroy()
    return all(torch.equal(grad, grad.to(torch.bfloat16).to(grad.dtype)) for grad in grads.values())


@pytest.mark.in_make_test("2")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_dtype_is_obeyed(pool1: RankPool, stage: int) -> None:
    """On one rank, where nothing is added but the micro-batches."""
    assert pool1.run(_accumulated_in, stage, "bf16") == [True]
    assert pool1.run(_accumulated_in, stage, "fp32") == [False]


# of ten steps, and the scales behind them by the number of overflows that halve it
OVERFLOWS = [False, True, False, False, False, True, True, False, False, False]
SCALES = {1: [64, 32, 32, 32, 64, 32, 16, 16, 16, 32], 2: [64, 64, 64, 64, 128, 128, 64, 64, 64, 128]}


def _dynamic_run(stage: int, fp16: dict[str, Any]) -> list[dict[str, Any]]:
    """Poison one gradient on rank 1 at the marked steps; what the engine reports after each step."""
    case = rounded(case_named("plain"), torch.float16)
    schedule = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 100, "warmup_type": "linear"},
    }
    engine = start(case.build(), make_config(stage, scheduler=schedule, fp16={"enabled": True, **fp16}))
    report = []
    with Faults(engine.module, rank=dist.get_rank()) as faults:
        for step, overflow in enumerate(OVERFLOWS):
            if overflow:
                faults.nan_gradient("layers.1.up.weight", step=step, rank=1, value=float("inf"))
            faults.step = step
            before = full_parameters(engine.module)
            lr = engine.get_lr()[0]
            engine.backward(case.seeded_loss(engine, here(step))[0])
            engine.step()
            after = full_parameters(engine.module)
            report.append({
                "scale": engine.loss_scale(),
                "skipped": engine.skipped_steps,
                "global": engine.global_steps,
                "overflow": bool(engine.optimizer.overflow),
                "applied": engine.was_step_applied(),
                "norm_finite": bool(torch.tensor(float(engine.get_global_grad_norm())).isfinite()),
                "lr_moved": engine.get_lr()[0] != lr,
                "moved": any(not torch.equal(before[name], after[name]) for name in before),
            })  # fmt: skip
    engine.destroy()
    return report


@pytest.mark.in_make_test("1-2", "2-3")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("hysteresis", SCALES)
def test_dynamic_scale_follows_the_rule_and_skips_are_counted(pool2: RankPool, stage: int, hysteresis: int) -> None:
    """The rule itself, and whether overflows in a row count alone: tests/pure/test_loss_scale.py."""
    fp16 = {"initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": hysteresis}
    good = [not overflow for overflow in OVERFLOWS]
    for report in pool2.run(_dynamic_run, stage, fp16):
        assert [entry["scale"] for entry in report] == SCALES[hysteresis]
        assert [entry["overflow"] for entry in report] == OVERFLOWS
        assert [entry["applied"] for entry in report] == good
        assert [entry["norm_finite"] for entry in report] == good
        assert [entry["skipped"] for entry in report] == [sum(OVERFLOWS[: i + 1]) for i in range(len(OVERFLOWS))]
        assert [entry["global"] for entry in report] == list(range(1, len(OVERFLOWS) + 1))
        # The first two updates of a warm-up run at its lowest rate, so movement is asked for from the third on.
        assert [entry["moved"] for entry in report[3:]] == good[3:]
        assert not any(entry["lr_moved"] for entry, overflow in zip(report, OVERFLOWS, strict=True) if overflow)
        assert [entry["lr_moved"] for entry in report[3:]] == good[3:]


def _overflow_at_the_floor() -> str:
    case = rounded(case_named("plain"), torch.float16)
    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1, "min_loss_scale": 1}
    engine = start(case.build(), make_config(2, fp16=fp16))
    with Faults(engine.module, rank=dist.get_rank()) as faults:
        faults.nan_gradient("head.weight", step=0, rank=1)
        engine.backward(case.seeded_loss(engine, here(0))[0])
        return outcome(engine.step)


def test_overflow_at_the_lowest_scale_is_an_error(pool2: RankPool) -> None:
    for said in pool2.run(_overflow_at_the_floor):
        assert "scale" in said.partition("): ")[2], said


def _manual_scaled(stage: int) -> tuple[dict[str, float], str]:
    case = rounded(case_named("plain"), torch.float16)
    expected = train_16bit(case, world=dist.get_world_size(), dtype=torch.float16, scale=128.0)
    engine = start(case.build(), make_config(stage, **FP16, **EXACT))
    for step in range(len(expected.norms)):
        engine.scale(case.seeded_loss(engine, here(step))[0]).backward()
        engine.step()
    errors = {
        n: scaled_error(safe_get_full_fp32_param(p), expected.masters[n]) for n, p in trainable(engine.module).items()
    }
    return errors, outcome(lambda: case.seeded_loss(engine, here(9))[0].backward())


@pytest.mark.in_make_test("1", "3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_manual_loop_scales_or_is_refused(pool2: RankPool, stage: int) -> None:
    for errors, refused in pool2.run(_manual_scaled, stage):
        assert max(errors.values()) <= 1e-6, errors
        assert "RuntimeError" in refused and "scale" in refused.partition("): ")[2], refused


def _of_inputs(stage: int) -> tuple[float, str, float]:
    """The error of an input's gradient under a loss scale; what is said of a backward to parameters without it; the
    norm of a window that follows.
    """
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    plain = copy.deepcopy(model).half()
    engine = start(model, make_config(stage, **FP16))
    x = torch.ones(4, 6).half().requires_grad_()
    found, wanted = (torch.autograd.grad(m(x).float().square().mean(), x)[0] for m in (engine, plain))
    said = outcome(lambda: engine(x).float().square().mean().backward())
    engine.backward(engine(x).float().square().mean())
    engine.step()
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return scaled_error(found.float(), wanted.float()), said, norm


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_of_inputs_needs_no_loss_scale(pool2: RankPool, stage: int) -> None:
    for error, said, norm in pool2.run(_of_inputs, stage):
        assert error <= 1e-3 and "called directly while the loss scale is" in said and 0 < norm < 100, (said, norm)


def _autocast_run(stage: int) -> tuple[float, set[torch.dtype], set[torch.dtype], float]:
    case = case_named("plain")
    model = case.build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = case.seeded_loss(model, here(0))[0]
    expected.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    engine = start(case.build(), make_config(stage, torch_autocast={"enabled": True, "dtype": "bfloat16"}))
    seen: set[torch.dtype] = set()
    engine.module.layers[0].up.register_forward_hook(lambda _m, _a, output: seen.add(output.dtype))
    (loss,) = case.seeded_loss(engine, here(0))
    engine.backward(loss)
    error = max(scaled_error(grad, grads[name]) for name, grad in full_gradients(trainable(engine.module)).items())
    loss_error = scaled_error(loss.detach(), expected.detach())
    engine.step()
    dtypes = {param.dtype for param in engine.module.parameters()}
    engine.destroy()
    return loss_error, seen, dtypes, error


@pytest.mark.in_make_test("0", "3")
@pytest.mark.parametrize("stage", STAGES)
def test_torch_autocast_computes_low_and_keeps_fp32_weights(pool2: RankPool, stage: int) -> None:
    for loss_error, seen, dtypes, grad_error in pool2.run(_autocast_run, stage):
        assert loss_error <= 1e-6
        assert seen == {torch.bfloat16}
        assert dtypes == {torch.float32}
        assert grad_error <= 1e-2


def _small_and_large_gradients(config: dict[str, Any]) -> tuple[float, bool]:
    """The error of gradients that fp16 cannot hold as they are; does an update whose gradients overflow it change
    weights?
    """
    model = nn.Linear(8, 8)
    nn.init.constant_(model.weight, 0.125)
    nn.init.zeros_(model.bias)
    engine = start(model, config)
    ones = torch.ones(2, 8, dtype=model.weight.dtype)
    engine.backward(engine(ones).float().sum() * 2.0**-26)
    error = max(float((g * 2.0**25 - 1).abs().max()) for g in full_gradients(trainable(model)).values())
    engine.zero_grad()
    before = full_parameters(model)
    engine.backward(engine(ones).float().sum() * 1e6)
    engine.step()
    changed = any(not torch.equal(value, before[name]) for name, value in full_parameters(model).items())
    engine.destroy()
    return error, changed


@pytest.mark.parametrize("stage", [0, 2])
def test_autocast_to_fp16_scales_the_loss(pool2: RankPool, stage: int) -> None:
    autocast = {"enabled": True, "dtype": "fp16"}
    for error, changed in pool2.run(_small_and_large_gradients, make_config(stage, torch_autocast=autocast)):
        assert error <= 1e-3 and not changed


@pytest.mark.parametrize("scale", [0, 2**16])
def test_fp16_sees_overflows_also_without_a_norm(pool2: RankPool, scale: int) -> None:
    """Where ``compute_grad_norm`` is false: a norm that nobody has asked for tells of an overflow."""
    config = make_config(2, zero={"compute_grad_norm": False}, fp16={"enabled": True, "loss_scale": scale})
    for error, changed in pool2.run(_small_and_large_gradients, config):
        assert error <= 1e-3 and not changed


class Quantised(Stack):
    """A frozen projection of 8-bit codes with one scale, dequantised in the forward, and a buffer of such codes."""

    codes: nn.Parameter

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        codes = torch.linspace(-3, 3, IN_FEATURES * IN_FEATURES).view(IN_FEATURES, IN_FEATURES).to(dtype)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("table", codes[0].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x @ self.codes.to(x.dtype) * 0.25 + self.get_buffer("table").to(x.dtype))


def codes_kept(stage: int, name: str, folder: str) -> tuple[float, str, bool, bool]:
    """fp32 error against plain training; dtypes of codes in a bf16 run; are its codes the same bits, and after a save
    and load?
    """
    dtype = getattr(torch, name)
    case = replace(case_named("plain"), build=seeded(lambda: Quantised(dtype)))  # type: ignore[arg-type]
    error = lockstep(case, make_config(stage))[0]
    engine = start(case.build(), make_config(stage, **BF16))
    for step in range(2):
        engine.backward(case.seeded_loss(engine, here(step))[0])
        engine.step()
    engine.save_checkpoint(folder, tag="t")
    wanted = Quantised(dtype).codes.view(torch.uint8)
    same = [torch.equal(full_parameters(engine.module)["codes"].view(torch.uint8), wanted)]
    dtypes = f"{engine.module.codes.dtype} {engine.module.table.dtype} {engine.module.head.weight.dtype}"
    engine.destroy()
    other = case.build()
    other.codes.data = torch.zeros(IN_FEATURES, IN_FEATURES).to(dtype)
    engine = start(other, make_config(stage, **BF16))
    engine.load_checkpoint(folder, tag="t")
    same.append(torch.equal(full_parameters(engine.module)["codes"].view(torch.uint8), wanted))
    engine.destroy()
    return error, dtypes, *same


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_8_bit_floats_stay_the_codes_they_are(pool2: RankPool, tmp_path: Path, stage: int, name: str) -> None:
    """They are neither cast to the compute dtype nor sent in a dtype no backend knows."""
    for error, dtypes, trained, loaded in pool2.run(codes_kept, stage, name, str(tmp_path)):
        assert error <= 1e-6
        assert dtypes == f"torch.{name} torch.{name} torch.bfloat16"
        assert trained and loaded


def trained_codes() -> str:
    model = Quantised(torch.float8_e4m3fn)
    model.codes.requires_grad_()
    return outcome(lambda: start(model, make_config(3)))


def test_trained_8_bit_floats_are_refused(pool1: RankPool) -> None:
    (said,) = pool1.run(trained_codes)
    assert "UsageError" in said and "'codes'" in said and "requires_grad_(False)" in said


def small_gradient_step(accumulation: str) -> float:
    """How far one update moves a weight whose gradient is below fp16's range."""
    fp16 = {"enabled": True, "initial_scale_power": 12}
    engine = start(seeded(Stack)(), make_config(2, fp16=fp16, data_types={"grad_accum_dtype": accumulation}))
    weight = engine.module.inp.weight
    before = safe_get_full_fp32_param(weight).clone()
    engine.backward((engine(torch.ones(4, IN_FEATURES).half()).float() * 1e-3).pow(2).mean())
    engine.step()
    moved = float((safe_get_full_fp32_param(weight) - before).abs().sum())
    engine.destroy()
    return moved


def test_unscaling_does_not_underflow_in_the_accumulation_dtype(pool2: RankPool) -> None:
    """fp16 gradients are divided by the loss scale after they are converted (small ones vanished)."""
    half, single = (pool2.run(small_gradient_step, dtype)[0] for dtype in ("fp16", "fp32"))
    assert half == pytest.approx(single, rel=1e-2)
