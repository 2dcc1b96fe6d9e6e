"""What an engine writes of each update: rates, norms, memory, MFU; a Prometheus file; layers with odd gradients."""

import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.client.comm import comms_log
from deepspeed.monitor.log import warning_once
from deepspeed.monitor.monitor import MonitorMaster, prometheus_name
from deepspeed.monitor.runfile import read_run
from deepspeed.profiling import update_metrics
from deepspeed.profiling.update_metrics import clipped_norm, tokens_in
from deepspeed.tools.simulate.models import Decoder, Shape
from tests.harness import pipes
from tests.harness.decoders import Llama, batch, loss_of
from tests.harness.logs import logged
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start

pytestmark = pytest.mark.timeout(120)
SHAPE = Shape(width=16, blocks=1, heads=2, inner=32, vocabulary=30, positions=16, key_heads=2)


def lines_of(run: Any) -> list[str]:
    with logged() as lines:
        run()
    return lines


def update(engine: Any, step: int) -> None:
    """Of a decoder."""
    engine.backward(engine(torch.randint(30, (4, 16), generator=torch.Generator().manual_seed(step))))
    engine.step()


def measured(path: str) -> dict[str, list[float]]:
    """The events of six updates with a profile, by name, and what the Prometheus file has in the end."""
    events: dict[str, list[float]] = {}
    config = make_config(
        2,
        prometheus={"enabled": True, "output_file": path},
        flops_profiler={"enabled": True, "peak_tflops": 0.01},
        wall_clock_breakdown=True,
        gradient_clipping=0.1,
    )
    engine = start(Decoder(SHAPE), config)
    write = engine.monitor.write_events

    def noting(those: Any) -> None:
        write(those)
        for name, value, _ in those:
            events.setdefault(name.removeprefix("Train/Samples/"), []).append(value)

    engine.monitor.write_events = noting
    for step in range(6):
        update(engine, step)
    events["flops"] = [engine.step_profile.flops_per_update]
    engine.destroy()
    return events


def test_every_update_has_its_figures(pool2: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "run.prom"
    events, _ = pool2.run(measured, str(path))
    assert len(events["train_loss"]) == len(events["grad_norm"]) == len(events["memory_host_bytes"]) == 6
    for before, after in zip(events["grad_norm"], events["grad_norm_clipped"], strict=True):
        assert before > 0.1 and after == pytest.approx(0.1, rel=1e-4)
    # the second update is timed and the third counted, after which the report is made
    assert len(events["samples_per_s"]) == len(events["tokens_per_s"]) == 2 and len(events["mfu"]) == 2
    for samples, tokens, tflops, mfu in zip(
        *(events[n] for n in ("samples_per_s", "tokens_per_s", "tflops_per_rank", "mfu")), strict=True
    ):
        assert tokens == pytest.approx(16 * samples) and mfu == pytest.approx(tflops / 0.01)
        assert tflops == pytest.approx(events["flops"][0] * samples / 8 / 1e12)
    exposed, under_way = events["exposed_communication_ms"], events["communication_ms"]
    assert len(exposed) == 5 and all(0 < a <= b for a, b in zip(exposed, under_way, strict=True))
    steps = [
        sum(ms) for ms in zip(*(events[f"elapsed_time_ms_{p}"] for p in ("forward", "backward", "step")), strict=True)
    ]
    assert all(wait < whole for wait, whole in zip(exposed, steps[1:], strict=True))
    text = path.read_text()
    values = dict(re.findall(r"^(deepspeed_\w+) (\S+)$", text, re.MULTILINE))
    assert float(values["deepspeed_train_loss"]) == events["train_loss"][-1] and values["deepspeed_samples"] == "48"
    assert "# TYPE deepspeed_mfu gauge" in text and [p.name for p in path.parent.iterdir()] == ["run.prom"]


def test_names_of_metrics_are_plain() -> None:
    assert prometheus_name("Train/Samples/lr") == "deepspeed_lr"
    assert prometheus_name("Mine/Some accuracy@5") == "deepspeed_mine_some_accuracy_5"


def samples_of_updates(folder: str) -> tuple[list[float], list[int]]:
    """The samples_per_s of updates a second apart, but the first, and the batch size of the throughput's line: of one,
    two and three micro-batches of two samples that the caller counts; and where a batch of two micro-batches is under
    way while the next ones are set to have three.
    """
    rates, sizes = list[float](), list[int]()
    for managed in (False, True):
        block = {"enabled": True, "output_path": folder, "job_name": str(managed)}
        config = make_config(0, train_micro_batch_size_per_gpu=2, managed_gradient_accumulation=managed)
        config |= {"gradient_accumulation_steps": 2 if managed else 1, "csv_monitor": block}
        engine = start(nn.Linear(4, 1), config)
        with patch.object(update_metrics, "time", SimpleNamespace(perf_counter=itertools.count().__next__)):
            for number, micros in enumerate((2, 2, 3) if managed else (1, 2, 3)):
                for micro in range(micros):
                    engine.backward(engine(torch.ones(2, 4)).sum())
                    if managed and number == 1 and micro == 0:
                        engine.set_train_batch_size(6)
                    if managed or micro == micros - 1:
                        engine.step()
        sizes.append(engine.tput_timer.batch_size)
        engine.destroy()
        rows = Path(folder, str(managed), "Train_Samples_samples_per_s.csv").read_text().splitlines()[1:]
        rates += [float(row.split(",")[1]) for row in rows]
    return rates, sizes


def test_rates_count_the_samples_of_the_update_that_has_ended(pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(samples_of_updates, str(tmp_path)) == [([4.0, 6.0, 4.0, 6.0], [6, 6])]


def refused(path: str) -> str:
    return outcome(lambda: start(Decoder(SHAPE), make_config(1, prometheus={"enabled": True, "output_file": path})))


def test_a_prometheus_file_that_cannot_be_written_is_refused(pool2: RankPool, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "file" / "a.prom"):
        (tmp_path / "file").write_text("")
        for said in pool2.run(refused, str(path)):
            assert "DeepSpeedConfigError" in said and "prometheus cannot" in said


def test_a_monitor_whose_disk_is_full_costs_values_and_not_the_run(tmp_path: Path) -> None:
    block = SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name="job")
    monitor = MonitorMaster(SimpleNamespace(csv_monitor=block))
    (tmp_path / "job" / "a.csv").symlink_to("/dev/full")
    with logged() as heard:
        monitor.write_events([("a", 1.0, 1)])
        monitor.write_events([("a", 1.0, 2)])
    assert len(heard) == 1 and heard[0].startswith("csv_monitor cannot write")


class NoService:
    """A package of a service that answers nothing but errors of its own."""

    class CommError(Exception):
        """Not an OSError."""

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at

    def init(self, **_: object) -> "NoService":
        return self._meet("init")

    def log(self, *_: object, **__: object) -> None:
        self._meet("log")

    def finish(self) -> None:
        self._meet("finish")

    def _meet(self, what: str) -> "NoService":
        if what == self._fails_at:
            raise NoService.CommError("no route to the service")
        return self


def without_service(fails_at: str) -> list[str]:
    """Three updates with a wandb whose calls of that name fail on the rank that makes them."""
    config = make_config(1, wandb={"enabled": True})

    def run() -> None:
        engine = start(nn.Linear(4, 4), config)
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
        engine.destroy()

    sys.modules["wandb"] = NoService(fails_at)  # type: ignore[assignment]
    warning_once.cache_clear()
    try:
        return lines_of(run)
    finally:
        del sys.modules["wandb"]


@pytest.mark.parametrize("fails_at", ["init", "log", "finish"])
def test_a_service_that_is_lost_on_the_first_rank_costs_values_and_not_the_run(pool2: RankPool, fails_at: str) -> None:
    first, second = pool2.run(without_service, fails_at)
    said = [line for line in first if line.startswith("wandb cannot")]
    assert len(said) == 1 and "CommError: no route to the service" in said[0], first
    assert not [line for line in second if "wandb" in line]


def test_tokens_are_found_where_models_take_them() -> None:
    ids, mask = torch.zeros(2, 7, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64)
    assert tokens_in((), {"attention_mask": mask, "input_ids": ids}) == 14
    assert tokens_in((torch.ones(3, 4), ids), {}) == 14 and tokens_in(({"input_ids": ids},), {}) == 14
    assert tokens_in((torch.ones(3, 4),), {"labels": torch.zeros(3, dtype=torch.int64)}) == 0


def test_clipping_is_that_of_the_update() -> None:
    assert clipped_norm(0.5, 1.0) == 0.5 and clipped_norm(5.0, 0.0) == 5.0
    assert clipped_norm(4.0, 1.0) == pytest.approx(1.0, rel=1e-6)


class OddLayers(nn.Module):
    """Layers one of which gets no gradient, one of which has rows that never do, and one that can be poisoned."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(9, 6), nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        with torch.no_grad():
            self.layers[1].bias.fill_(5.0)
            self.layers[1].bias[2:4] = -1000.0  # behind the ReLU these are always off

    def forward(self, tokens: torch.Tensor, poison: float) -> torch.Tensor:
        x = self.table(tokens)
        x = torch.relu(self.layers[1](x)) + self.layers[2](x).detach() * 0 + self.layers[3](x) * poison
        return self.layers[0](x).square().mean()


def odd_layers(stage: int, **config: Any) -> list[str]:
    """What is said of six updates, the fifth of which is not finite."""
    torch.manual_seed(4)

    def run() -> None:
        engine = start(OddLayers(), make_config(stage, **config))
        looks = bool(engine.runtime.events or engine.update_metrics.wanted)
        assert looks is config["anomalies"].get("enabled", True)
        for step in range(6):
            tokens = torch.randint(3, (4, 5), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(tokens, float("nan") if step == 4 else 0.5))
            engine.step()
        engine.destroy()

    return lines_of(run)


PER_LAYER = {"per_layer": True, "window": 4}
PLACES: list[tuple[int, dict[str, Any]]] = [
    *((stage, {}) for stage in (0, 1, 3)),
    (1, {"offload_optimizer": {"device": "cpu"}}),
    (3, {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}),
]


@pytest.mark.parametrize(("stage", "zero"), PLACES, ids=["0", "1", "3", "1 host", "3 drive"])
def test_layers_with_odd_gradients_are_named_once(
    pool2: RankPool, stage: int, zero: dict[str, Any], tmp_path: Path
) -> None:
    drives = {name: {**block, "nvme_path": str(tmp_path)} for name, block in zero.items() if "nvme" in block.values()}
    lines, others = pool2.run(odd_layers, stage, anomalies=PER_LAYER, zero=zero | drives)
    said = [line for line in lines if "the gradient of" in line and "skipped" not in line]
    zero = next(line for line in said if "has been zero for 3 updates" in line)
    assert zero.startswith("step 3: ") and {"layers.2.weight", "layers.2.bias"} == set(re.findall(r"layers\S+\w", zero))
    dead = [line for line in said if "dead units" in line]
    assert dead == ["step 4: the gradient of layers.1.weight has not reached 2 of its 6 rows for 4 updates: dead units"]
    bad = [line for line in said if "is not finite" in line]
    assert len(bad) == 1 and bad[0].startswith("step 5: ") and "layers.3.weight" in bad[0]
    assert len(said) == 3 and not any("the gradient of" in line and "skipped" not in line for line in others)


def watched_parts() -> list[str]:
    """Two ranks that share the layers: the fourth head is never asked for, the second block's inner layer neither."""

    def run() -> None:
        model = Llama()
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight[:, -4:] = 0
        model.model.layers[1].mlp.down_proj.register_forward_hook(lambda _, __, output: output * 0)
        config = make_config(1, tensor_parallel={"autotp_size": 2}, anomalies=PER_LAYER)
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
        engine = start(model, config)
        for step in range(5):
            engine.backward(loss_of(engine, batch(step, 0)))
            engine.step()
        engine.destroy()

    return lines_of(run)


def test_of_layers_in_parts_each_odd_gradient_is_named_once(pool2: RankPool) -> None:
    first, second = ([line for line in lines if "the gradient of" in line] for lines in pool2.run(watched_parts))
    zero, mlp = first[0], "model.layers.1.mlp"
    assert zero.startswith("step 3: ") and "has been zero for 3 updates" in zero and len(first) == 1, first
    assert all(f"{mlp}.{name}_proj.weight" in zero for name in ("gate", "up", "down"))
    assert second == [
        "step 4: the gradient of model.layers.0.self_attn.q_proj.weight has not reached 4 of its 8 rows on "
        "tensor-parallel rank 1 for 4 updates: dead units"
    ]


class Deaf(pipes.Block):
    """Adds nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0 + x


def watched_stages() -> list[str]:
    def run() -> None:
        specs = pipes.layers()
        specs[4] = pipes.LayerSpec(Deaf, 14)
        module = pipes.PipelineModule(specs, num_stages=2, loss_fn=pipes.cross_entropy)
        engine = pipes.start(module, pipes.config(1, 2, anomalies=PER_LAYER))
        for step in range(4):
            engine.train_batch(iter([pipes.micro_batch(step, micro, 0) for micro in range(2)]))
        engine.destroy()

    return lines_of(run)


def test_of_a_pipeline_each_layer_is_named_by_the_rank_that_has_it(pool2: RankPool) -> None:
    said = [[line for line in lines if "has been zero" in line] for lines in pool2.run(watched_stages)]
    (line,) = [line for lines in said for line in lines]
    assert line.startswith("step 3: ") and set(re.findall(r"\b(\d+)\.\w+\.", line)) == {"4"}


def test_layers_are_not_looked_at_unasked(pool1: RankPool) -> None:
    (lines,) = pool1.run(odd_layers, 1, anomalies={"enabled": False, **PER_LAYER})
    assert not [line for line in lines if "dead units" in line or "has been zero" in line]


def spiked(**changes: Any) -> list[str]:
    slow = {"type": "SGD", "params": {"lr": 1e-5}}

    def run() -> None:
        engine = start(nn.Linear(4, 4), make_config(0, optimizer=slow, **changes))
        for step in range(40):
            engine.backward(engine(torch.ones(4, 4)).square().mean() * (1000.0 if step == 30 else 1.0))
            engine.step()
        engine.destroy()

    return lines_of(run)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_spike_of_loss_and_norm_is_said_by_the_first_rank(recorded: bool, pool2: RankPool, tmp_path: Path) -> None:
    run = {"observe": {"run": str(tmp_path)}, "gradient_clipping": 1e9}
    first, second = pool2.run(spiked, **(run if recorded else {"anomalies": {"enabled": True}}))
    said = [line for line in first if "step 31: " in line]
    assert len(said) == 2 and "the loss is" in said[0] and "the gradient norm is" in said[1], first
    assert not [line for line in second if "step 31: " in line]
    if recorded:
        texts = [warning["text"].partition(" is ")[0] for warning in read_run(tmp_path).of("warning")]
        # beside those of a rank that is slow, as a rank on a machine with other work may be
        assert [t for t in texts if t.startswith("step")] == ["step 31: the loss", "step 31: the gradient norm"]


def evaluated(folder: str) -> list[tuple[str, float]]:
    events: list[tuple[str, float]] = []
    block = {"enabled": True, "output_path": folder}
    engine = pipes.start(
        pipes.PipelineModule(pipes.layers(), num_stages=2, loss_fn=pipes.cross_entropy),
        pipes.config(1, 2, csv_monitor=block),
    )
    engine.monitor.write_events = lambda those: events.extend((name, value) for name, value, _ in those)
    engine.train_batch(pipes.batches(0, micros=2))
    loss = engine.eval_batch(pipes.batches(0, micros=2))
    events.append(("loss", float(loss)))
    engine.destroy()
    return events


def test_a_pipeline_reports_its_evaluation(pool2: RankPool, tmp_path: Path) -> None:
    first, _ = pool2.run(evaluated, str(tmp_path))
    found = dict(first)
    assert found["Train/Samples/eval_loss"] == found["loss"] and "Train/Samples/grad_norm" in found


def caller_of_a_call() -> list[str]:
    try:
        deepspeed.comm.configure(enabled=True, debug=True)
        deepspeed.comm.all_reduce(torch.ones(4))
        return comms_log.LOG.ops()
    finally:
        comms_log.LOG.__init__()  # type: ignore[misc]


def test_the_log_names_the_function_that_called_a_collective(pool1: RankPool) -> None:
    assert pool1.run(caller_of_a_call) == [["all_reduce | [Caller Func: caller_of_a_call]"]]


def units_of_calls() -> list[str]:
    try:
        engine = start(Decoder(SHAPE), make_config(3, comms_logger={"debug": True}))
        for step in range(2):
            update(engine, step)
        names = comms_log.LOG.ops()
        engine.destroy()
        return names
    finally:
        comms_log.LOG.__init__()  # type: ignore[misc]


def test_the_log_names_the_unit_of_an_engines_collective(pool2: RankPool) -> None:
    for names in pool2.run(units_of_calls):
        assert any(name.startswith("all_gather |") and "unit blocks.0" in name for name in names), names
        assert any(name.startswith("reduce_scatter |") and "unit blocks.0" in name for name in names), names
