"""Where one training step of this project goes: phases, collectives issued and waited for, and the most expensive
operators.

Run it as the last section of benchmarks/README.md says.
"""

import argparse
import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from models import WORKLOADS, Workload, build_model, make_batch
from torch.profiler import ProfilerActivity, profile

import deepspeed
import deepspeed.comm as dist
from deepspeed.comm import collectives
from deepspeed.tier.transfer import Transfer

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from engine import config_for

PHASES = ("forward", "backward", "step")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "sum_in_place")


class Stopwatch:
    """Adds up seconds and counts by (phase, what)."""

    def __init__(self) -> None:
        self.phase = "setup"
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.counts: dict[tuple[str, str], int] = defaultdict(int)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Book the time inside the block under the current phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[self.phase, what] += time.perf_counter() - start
            self.counts[self.phase, what] += 1

    def collective(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its issue booked, and the wait of the transfer it returns."""

        def issue(*args: Any, **kwargs: Any) -> Any:
            with self.timed(f"{name}, issue"):
                result = function(*args, **kwargs)
            return TimedTransfer(result, name, self) if isinstance(result, Transfer) else result

        return issue


class TimedTransfer(Transfer):
    """A transfer whose wait is booked."""

    def __init__(self, inner: Transfer, name: str, watch: Stopwatch) -> None:
        self._inner, self._name, self._watch = inner, name, watch

    def wait(self) -> None:
        """Wait for the inner transfer, on the clock."""
        with self._watch.timed(f"{self._name}, wait"):
            self._inner.wait()

    def done(self) -> bool:
        """Whether the inner transfer has ended."""
        return self._inner.done()


def train_step(engine: deepspeed.DeepSpeedEngine, workload: Workload, index: int, watch: Stopwatch) -> None:
    """One step with its three phases booked."""
    inputs, targets = make_batch(workload, dist.get_rank(), index)
    watch.phase = "forward"
    with watch.timed("total"):
        loss = engine(inputs, targets)
    watch.phase = "backward"
    with watch.timed("total"):
        engine.backward(loss)
    watch.phase = "step"
    with watch.timed("total"):
        engine.step()


def report(watch: Stopwatch, steps: int) -> str:
    """Milliseconds and counts per step, rank 0."""
    lines = [f"{'phase':<10}{'what':<28}{'ms/step':>10}{'count/step':>12}"]
    for phase in PHASES:
        rows = {what: seconds for (at, what), seconds in watch.seconds.items() if at == phase}
        rest = rows.get("total", 0.0) - sum(seconds for what, seconds in rows.items() if what != "total")
        for what, seconds in sorted(rows.items(), key=lambda row: -row[1]):
            lines.append(
                f"{phase:<10}{what:<28}{1e3 * seconds / steps:>10.1f}{watch.counts[phase, what] / steps:>12.1f}"
            )
        lines.append(f"{phase:<10}{'compute and the rest':<28}{1e3 * rest / steps:>10.1f}")
    return "\n".join(lines)


def main() -> None:
    """Time the phases first, then run the profiler over the same number of steps, so that its cost stays out of the
    first table.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="134m")
    parser.add_argument("--level", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--variant", default="default", help="as in peers/engine.py")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of rank 0 here")
    args = parser.parse_args()
    workload, watch = WORKLOADS[args.model], Stopwatch()
    for name in COLLECTIVES:
        setattr(collectives, name, watch.collective(name, getattr(collectives, name)))
    deepspeed.init_distributed(dist_backend="gloo")
    config = config_for(args, workload)
    with (
        deepspeed.zero.Init(config_dict_or_path=config)
        if args.level == 3 and args.variant != "no_init"
        else contextlib.nullcontext()
    ):
        model = build_model(workload)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for index in range(args.warmup):
        train_step(engine, workload, index, watch)
    watch.seconds.clear()
    watch.counts.clear()
    for index in range(args.steps):
        train_step(engine, workload, index, watch)
    table = report(watch, args.steps)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for index in range(args.steps):
            train_step(engine, workload, index, watch)
    if dist.get_rank() == 0:
        operators = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=48)
        sys.stdout.write(f"{table}\n\n{operators}\n")
        if args.trace is not None:
            profiler.export_chrome_trace(str(args.trace))
    engine.destroy()


if __name__ == "__main__":
    main()
