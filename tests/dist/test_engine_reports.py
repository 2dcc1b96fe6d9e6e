"""What an engine says and changes around training: reports, the communication log, process settings; and sums in place
of means.
"""

import gc
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspeed
import deepspeed.comm as comm
from deepspeed.client.comm import comms_log
from deepspeed.errors import DeepSpeedConfigError, NotYetError
from deepspeed.monitor.log import logger
from deepspeed.monitor.runfile import read_run
from deepspeed.tools.verify.grads import full_gradients, full_parameters, scaled_error
from deepspeed.tools.verify.models import MicroBatch, case_named
from deepspeed.tools.verify.reference import trainable
from deepspeed.zero.param import ReleasedFace
from tests.harness.faults import modules_replaced
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import here, make_config, outcome, start, train_step

pytestmark = pytest.mark.timeout(60)


def said(config: dict[str, Any], steps: int = 4) -> list[str]:
    """The log lines of so many steps under ``config``."""
    with logged(set_level=logging.INFO) as lines:
        case = case_named("plain")
        engine = start(case.build(), config)
        for step in range(steps):
            train_step(engine, case, step)
        engine.destroy()
    return lines


def test_dump_state_shows_the_resolved_configuration_and_the_units(pool2: RankPool) -> None:
    first, second = pool2.run(said, make_config(3, dump_state=True, comet={"api_key": "not for the log"}), 1)
    (dump,) = [line for line in first if "dump_state" in line]
    assert "gradient_accumulation_steps = 1 (file)" in dump and "train_batch_size = 8 (derived)" in dump
    assert "PARAM S device" in dump and "PARAM R device, GRAD S device" in dump
    assert "group 0: " in dump and "lr=" in dump
    assert not any("dump_state" in line for line in second) and "not for the log" not in dump


def test_the_first_line_says_what_is_sharded_and_what_keeps_the_rest_whole(pool1: RankPool, pool2: RankPool) -> None:
    def parts(stage: int, pool: RankPool = pool2, **keys: Any) -> str:
        first = pool.run(said, make_config(stage, **keys), 0)[0]
        return next(line for line in first if "parameters in" in line).partition(" unit")[2].partition(", ZeRO")[0]

    assert parts(2) in ("", "s") and parts(3, pool1) in ("", "s")
    keeps = "; stage3_param_persistence_threshold 100,000 keeps "
    whole = {"stage": 3, "stage3_param_persistence_threshold": 100_000}
    said_of_whole = parts(3, zero_optimization=whole)
    assert said_of_whole.endswith(" whole)") and keeps in said_of_whole
    assert "keeps" not in parts(3, zero_optimization={**whole, "stage3_param_persistence_threshold": 0})


def test_every_phase_has_its_memory_and_its_time_and_the_progress_its_throughput(pool1: RankPool) -> None:
    rate = {"type": "SGD", "params": {"lr": 0.1 + 0.2}}
    config = make_config(2, memory_breakdown=True, wall_clock_breakdown=True, steps_per_print=1, optimizer=rate)
    (lines,) = pool1.run(said, config)
    phases = ("initialize", "forward", "backward", "step")
    assert [sum(f"memory after {phase}" in line for line in lines) for phase in phases] == [1, 4, 4, 4]
    assert all("process RSS" in line for line in lines if "memory after" in line)
    times = [line for line in lines if "time (ms)" in line]
    assert times and all(phase in line for line in times for phase in phases[1:])
    assert sum("samples/s" in line for line in lines) == 2  # two updates warm up
    assert sum("lr=[0.3], mom=" in line for line in lines) == 4
    (lines,) = pool1.run(said, make_config(0, steps_per_print=1, timers={"throughput": {"enabled": False}}))
    assert not any("samples/s" in line for line in lines)


def collection_of_two() -> list[bool]:
    """Whether collection is on: before, with A, with A and B, with B alone, with neither."""
    gc.enable()
    seen = [gc.isenabled()]
    first = start(case_named("plain").build(), make_config(0, disable_python_gc=True))
    seen.append(gc.isenabled())
    second = start(case_named("plain").build(), make_config(0, disable_python_gc=True))
    seen.append(gc.isenabled())
    first.destroy()
    seen.append(gc.isenabled())
    assert second.collect_python_gc() >= 0
    second.destroy()
    return [*seen, gc.isenabled()]


def test_collection_is_off_while_any_engine_wants_it_off(pool1: RankPool) -> None:
    assert pool1.run(collection_of_two) == [[True, False, False, False, True]]


def levels_of_three() -> list[int]:
    """The logger's level: before, with each engine in turn, and as they end in another order."""
    before = logger.level
    logger.setLevel(logging.INFO)
    seen = []
    engines = [
        start(case_named("plain").build(), make_config(0, log_level=level))
        for level in ("warning", "error", "critical")
    ]
    seen.append(logger.level)
    for index in (1, 2, 0):
        engines[index].destroy()
        engines[index].destroy()
        seen.append(logger.level)
    logger.setLevel(before)
    return seen


def test_the_newest_living_engine_sets_the_log_level(pool1: RankPool) -> None:
    assert pool1.run(levels_of_three) == [[logging.CRITICAL, logging.CRITICAL, logging.WARNING, logging.INFO]]


def logged_collectives() -> tuple[dict[str, int], dict[str, Any], bool]:
    """Counts by op during one step of stage 3, the summary, and whether an engine without the block logs anything."""
    try:
        case = case_named("plain")
        said(make_config(3), steps=1)
        by_default = comm.has_comm_data()
        engine = start(case.build(), make_config(3, comms_logger={"enabled": True, "debug": False}))
        comm.reset_log()
        train_step(engine, case, 0)
        counts = {op: comm.get_comm_operation_count(op) for op in comm.get_logged_comm_ops()}
        expected = engine.runtime.counts.reductions
        summary = comm.log_summary(show_straggler=True, return_dict=True)
        engine.destroy()
        assert summary is not None and counts["reduce_scatter"] == expected
        return counts, summary["summary"]["reduce_scatter"], by_default
    finally:
        comms_log.LOG.__init__()  # type: ignore[misc]


def test_the_communication_log_holds_the_collectives_of_an_engine_that_asks_for_it(pool2: RankPool) -> None:
    for counts, sizes, by_default in pool2.run(logged_collectives):
        assert set(counts) == {"all_gather", "all_reduce", "reduce_scatter"}
        assert all(row["total_latency_ms"] > 0 and row["msg_size_bytes"] == size for size, row in sizes.items())
        assert not by_default


def summed(stage: int) -> float:
    """The largest error of the gradients under "sum" against those of the sum of the ranks' losses."""
    case = case_named("plain")
    plain = case.build()
    world = torch.distributed.get_world_size()
    for rank in range(world):
        (loss,) = case.seeded_loss(plain, MicroBatch(0, 0, rank, world))
        loss.backward()
    engine = start(case.build(), make_config(stage, gradient_allreduce_op="sum"))
    (loss,) = case.seeded_loss(engine, here(0))
    engine.backward(loss)
    expected = trainable(plain)
    errors = [scaled_error(g, expected[n].grad) for n, g in full_gradients(trainable(engine.module)).items()]  # type: ignore[arg-type]
    engine.step()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in expected.values() if p.grad is not None]))
    errors.append(abs(engine.get_global_grad_norm() - float(norm)) / float(norm))
    engine.destroy()
    return max(errors)


@pytest.mark.parametrize("stage", [0, 1])
def test_gradient_allreduce_op_sum_adds_the_ranks(pool2: RankPool, stage: int) -> None:
    assert max(pool2.run(summed, stage)) <= 1e-6


def low_precision_modules() -> tuple[dict[str, str], float]:
    """Dtypes of the parameters, and how far the run is from one that only autocasts."""
    case = case_named("plain")
    results = []
    for names in (None, ["torch.nn.Linear"]):
        autocast = {"enabled": True, **({"lower_precision_safe_modules": names} if names else {})}
        engine = start(case.build(), make_config(3, torch_autocast=autocast))
        for step in range(3):
            train_step(engine, case, step)
        results.append({name: value.float() for name, value in full_parameters(engine.module).items()})
        dtypes = {name: str(p.dtype) for name, p in engine.module.named_parameters()}
        assert all(p.autocast_dtype is p.dtype for p in engine.module.parameters())
        assert all(u.master is None or u.master.dtype is torch.float32 for u in engine.runtime.units)
        engine.destroy()
    plain, low = results
    return dtypes, max(scaled_error(low[name], plain[name]) for name in plain)


def test_lower_precision_safe_modules_rest_and_travel_in_the_autocast_dtype(pool2: RankPool) -> None:
    for dtypes, error in pool2.run(low_precision_modules):
        assert {name for name, dtype in dtypes.items() if dtype == "torch.float32"} == {
            n for n in dtypes if ".norm." in n
        }
        assert error < 0.02


def unknown_class() -> list[str]:
    said = []
    for name in ("torch.nn.NoSuchLayer", "torch.nn.functional.relu"):
        config = make_config(0, torch_autocast={"enabled": True, "lower_precision_safe_modules": [name]})
        said.append(outcome(lambda config=config: start(case_named("plain").build(), config)))
    return said


def test_a_class_that_is_not_there_is_refused(pool1: RankPool) -> None:
    for text in pool1.run(unknown_class)[0]:
        assert DeepSpeedConfigError.__name__ in text and "lower_precision_safe_modules" in text


def kept(stage: int) -> tuple[set[str], str]:
    """The fp32 parameters and the buffer's dtype of a bf16 run that keeps one module."""
    model = case_named("plain").build()
    model.head.register_buffer("table", torch.zeros(3))
    config = make_config(stage, bf16={"enabled": True}, data_types={"keep_in_fp32_modules": ["head"]})
    engine = start(model, config)
    names = {n for n, p in engine.module.named_parameters() if p.dtype is torch.float32}
    dtype = str(model.head.table.dtype)
    engine.destroy()
    return names, dtype


@pytest.mark.parametrize("stage", [1, 3])
def test_keep_in_fp32_modules_keeps_these_and_no_others(pool2: RankPool, stage: int) -> None:
    for names, dtype in pool2.run(kept, stage):
        assert names == {"head.weight", "head.bias"} and dtype == "torch.float32"


def written(folder: str) -> dict[str, str]:
    """The CSV files of a run of three updates with two micro-batches each, and the mean losses."""
    case = case_named("plain", accumulation=2)
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}}
    block = {"enabled": True, "output_path": folder, "job_name": "run"}
    config = make_config(
        2, csv_monitor=block, gradient_accumulation_steps=2, scheduler=scheduler, fp16={"enabled": True}
    )
    config["wall_clock_breakdown"] = True
    engine = start(case.build(), config)
    assert engine.monitor.enabled
    losses = [sum(train_step(engine, case, step)) / 2 for step in range(3)]
    engine.monitor.write_events([("Mine/accuracy", 0.5, 7)])
    engine.destroy()
    found = {path.name: path.read_text() for path in (Path(folder) / "run").iterdir()}
    return found | {"losses": " ".join(map(str, losses))} if torch.distributed.get_rank() == 0 else {}


def test_csv_monitor_writes_one_row_per_update(pool2: RankPool, tmp_path: Path) -> None:
    files = pool2.run(written, str(tmp_path))[0]
    names = (
        "lr",
        "train_loss",
        "loss_scale",
        *(f"elapsed_time_ms_{phase}" for phase in ("forward", "backward", "step")),
        *("elapsed_time_ms_backward_inner", "elapsed_time_ms_backward_allreduce"),
        *("grad_norm", "grad_norm_clipped", "memory_host_bytes", "memory_host_peak_bytes"),
        *("states_host_bytes", "states_drive_bytes"),
    )
    later = ("samples_per_s", "communication_ms", "exposed_communication_ms")  # from the second update on
    rates = {f"Train_Samples_{name}.csv" for name in later}
    assert set(files) == {"Mine_accuracy.csv", "losses", *rates, *(f"Train_Samples_{name}.csv" for name in names)}
    assert all(len(files[name].splitlines()) == 3 for name in rates)
    assert files["Mine_accuracy.csv"] == "step,accuracy\n7,0.5\n"
    for name in names:
        title, *rows = files[f"Train_Samples_{name}.csv"].splitlines()
        assert title == f"step,{name}" and [row.split(",")[0] for row in rows] == ["16", "32", "48"]
    whole, inner, reduced = (
        [float(row.split(",")[1]) for row in files[f"Train_Samples_elapsed_time_ms_{name}.csv"].splitlines()[1:]]
        for name in ("backward", "backward_inner", "backward_allreduce")
    )
    assert [a + b for a, b in zip(inner, reduced, strict=True)] == pytest.approx(whole)
    noted = [float(row.split(",")[1]) for row in files["Train_Samples_train_loss.csv"].splitlines()[1:]]
    assert noted == pytest.approx([float(loss) for loss in files["losses"].split()], rel=1e-3)


def divided_by_the_caller(folder: str) -> list[float]:
    """The train_loss of updates of four micro-batches of the loss 8, divided by the caller; the last of the record."""
    blocks = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    config = make_config(1, gradient_accumulation_steps=4, observe={"run": f"{folder}/record"}, **blocks)
    engine = start(torch.nn.Linear(4, 1), config)
    for _ in range(8):
        engine.backward((engine(torch.zeros(1, 4)).sum() * 0 + 8.0) / 4, scale_wrt_gas=False)
        engine.step()
    engine.destroy()
    rows = Path(folder, "run", "Train_Samples_train_loss.csv").read_text().splitlines()[1:]
    (record,) = Path(folder, "record").glob("*.jsonl")
    recorded = re.findall(r'"loss": ?([0-9.]+)', record.read_text())
    return [float(row.split(",")[1]) for row in rows] + [float(loss) for loss in recorded]


def test_a_loss_that_the_caller_divides_is_reported_as_the_mean_of_the_update(pool1: RankPool, tmp_path: Path) -> None:
    """As transformers.Trainer divides it."""
    assert pool1.run(divided_by_the_caller, str(tmp_path)) == [[8.0] * 4]


def lost_on_the_way(folder: str) -> list[float]:
    """The train_loss of updates, and the losses of their record, where the loss 100 came before in a backward that
    raised, and in a window that was dropped.
    """
    blocks = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    engine = start(torch.nn.Linear(4, 1), make_config(1, observe={"run": f"{folder}/record"}, **blocks))
    for raises in (True, False):
        lost = engine(torch.zeros(1, 4)).sum() * 0 + 100.0
        if raises:
            lost.register_hook(lambda _: [].pop())
        said = outcome(lambda lost=lost: engine.backward(lost, scale_wrt_gas=False))
        assert ("IndexError" in said) is raises
        engine.zero_grad()
        engine.backward(engine(torch.zeros(1, 4)).sum() * 0 + 8.0, scale_wrt_gas=False)
        engine.step()
    engine.destroy()
    rows = Path(folder, "run", "Train_Samples_train_loss.csv").read_text().splitlines()[1:]
    return [float(row.split(",")[1]) for row in rows] + [line["loss"] for line in read_run(f"{folder}/record").updates]


def test_a_loss_that_was_lost_is_in_no_report(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(lost_on_the_way, str(tmp_path)) == [[8.0] * 4]


def updated_by_the_optimizer(folder: str) -> dict[str, Any]:
    """What is told and kept of four updates by ``optimizer.step()``, as Lightning's Fabric makes them."""
    blocks = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    blocks["flops_profiler"] = {"enabled": True, "profile_step": 0, "output_file": f"{folder}/flops"}
    engine = start(torch.nn.Linear(4, 1), make_config(1, steps_per_print=1, observe={"run": f"{folder}/r"}, **blocks))
    followed: list[int] = []
    engine._after_update.append(lambda: followed.append(engine.global_steps))
    with logged(set_level=logging.INFO) as lines:
        for _ in range(4):
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.optimizer.step()
    kept = len(engine.update_metrics._losses)
    engine.destroy()
    rows = Path(folder, "run", "Train_Samples_train_loss.csv").read_text().splitlines()[1:]
    found = {"rows": len(rows), "kept": kept, "followed": followed, "profile": Path(folder, "flops").read_text() != ""}
    found["recorded"] = [line["step"] for line in read_run(f"{folder}/r").updates]
    return found | {"printed": sum("step=" in line and "lr=" in line for line in lines)}


def test_updates_by_the_optimizers_step_are_reported_too(pool1: RankPool, tmp_path: Path) -> None:
    (found,) = pool1.run(updated_by_the_optimizer, str(tmp_path))
    updates = [1, 2, 3, 4]
    assert found["followed"] == found["recorded"] == updates and found["profile"]
    assert (found["rows"], found["printed"], found["kept"]) == (4, 4, 0)


def written_by_one(folder: str, *, on: int) -> list[str]:
    """The CSV files of a run whose loss is weighed over all ranks, where rank ``on`` alone enables the monitor."""
    enabled = torch.distributed.get_rank() == on
    block = {"enabled": enabled, "output_path": folder, "job_name": "run"}
    engine = start(torch.nn.Linear(4, 1), make_config(1, normalize="tokens", csv_monitor=block))
    for _ in range(2):
        loss = engine(torch.ones(1, 4)).sum()
        engine.set_batch_tokens(4)
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return sorted(path.name for path in Path(folder).glob("run/*loss*"))


def test_the_first_rank_may_have_a_monitor_alone_and_another_rank_none(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(written_by_one, str(tmp_path / "second"), on=1) == [[]] * 2
    assert "Train_Samples_train_loss.csv" in pool2.run(written_by_one, str(tmp_path / "first"), on=0)[0]


def written_apart(folder: str) -> list[str]:
    """The files of the monitor of this rank's engine, one of two that have a rank each."""
    alone = [torch.distributed.new_group([rank]) for rank in range(2)][torch.distributed.get_rank()]
    block = {"enabled": True, "output_path": folder, "job_name": str(torch.distributed.get_rank())}
    mpu = SimpleNamespace(get_data_parallel_group=lambda: alone)
    engine = start(torch.nn.Linear(4, 1), make_config(1, csv_monitor=block), mpu=mpu)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()
    torch.distributed.destroy_process_group(alone)
    return sorted(path.name for path in Path(folder, block["job_name"]).glob("*loss.csv"))


def test_an_engine_without_the_jobs_first_rank_writes_its_metrics_too(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(written_apart, str(tmp_path)) == [["Train_Samples_train_loss.csv"]] * 2


def unwritable(folder: str) -> tuple[str, str, bool]:
    """What a folder that cannot be made, and a package that is not there, say; the model stays usable."""
    model = case_named("plain").build()
    Path(folder, "file").write_text("")
    said = outcome(lambda: start(model, make_config(2, csv_monitor={"enabled": True, "output_path": f"{folder}/file"})))
    with modules_replaced({"torch.utils.tensorboard": None}):
        missing = outcome(lambda: start(model, make_config(2, tensorboard={"enabled": True, "output_path": folder})))
    start(model, make_config(2)).destroy()
    return said, missing, True


def test_a_monitor_that_cannot_work_is_refused_before_anything_is_taken(pool2: RankPool, tmp_path: Path) -> None:
    for said, missing, usable in pool2.run(unwritable, str(tmp_path)):
        assert "DeepSpeedConfigError" in said and "csv_monitor cannot make the folder" in said
        assert "pip install tensorboard" in missing and usable


# -- engine surface -------------------------------------------------------------------------------------------------
def generate_unevenly(stage: int) -> list[str]:
    case = case_named("plain")
    engine = start(case.build(), make_config(stage))
    faults = []
    inputs = case.batch(here(0))[0]
    train_step(engine, case, 0)
    engine.eval()
    if engine.training or engine.module.training:
        faults.append("it trains after eval()")
    with torch.no_grad():
        expected = engine(inputs)
        with deepspeed.zero.unwrap_model_for_generation(engine) as whole:
            for _ in range(1 + 2 * torch.distributed.get_rank()):  # no collective inside, so counts may differ
                if not torch.equal(whole(inputs), expected):
                    faults.append("the unwrapped module computes something else")
    if stage == 3 and not any(isinstance(p, ReleasedFace) for p in engine.module.parameters()):
        faults.append("nothing was released afterwards")
    engine.train()
    if not (engine.training and engine.module.training):
        faults.append("it does not train after train()")
    train_step(engine, case, 1)
    return faults


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_may_generate_different_lengths_inside_unwrap_and_modes_are_known(pool2: RankPool, stage: int) -> None:
    assert pool2.run(generate_unevenly, stage) == [[], []]


def test_readers_have_the_names_that_help_and_tracebacks_show() -> None:
    for name in ("train_batch_size", "loss_scale", "current_loss_scale", "get_global_grad_norm"):
        assert getattr(deepspeed.DeepSpeedEngine, name).__name__ == name


def missing(names: list[str]) -> list[str]:
    engine = start(case_named("plain").build(), make_config(0))
    said = [outcome(lambda name=name: getattr(engine, name)("somewhere")) for name in names]
    engine.destroy()
    return said


def test_parts_that_come_later_say_so_by_name(pool1: RankPool) -> None:
    names = ["train_batch", "eval_batch"]
    for name, said in zip(names, pool1.run(missing, names)[0], strict=True):
        assert NotYetError.__name__ in said and name in said


# -- profiler names -------------------------------------------------------------------------------------------------
def _ranges() -> tuple[set[str], set[str]]:
    """The names that a profiler sees in a step, and those of the sharded units."""
    case = case_named("plain")
    engine = start(case.build(), make_config(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train_step(engine, case, 0)
    titles = {unit.name for unit in engine.runtime.units if unit.movable}
    engine.destroy()
    return {event.key for event in profile.key_averages()}, titles


def test_phases_gathers_and_reductions_are_ranges_of_the_profiler(pool2: RankPool) -> None:
    for seen, titles in pool2.run(_ranges):
        assert titles and {"forward", "backward", "step"} <= seen
        assert {f"{what} {title}" for what in ("gather", "reduce") for title in titles} <= seen
