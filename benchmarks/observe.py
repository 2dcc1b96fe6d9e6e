"""What the record of a run costs: processor time and clock of a step, with and without, alternating in one engine.

    python benchmarks/observe.py [--ranks 2] [--layers 12] [--width 256] [--rounds 12] [--steps 60] [--updates 300]
                                 [--trace]

The job is that of benchmarks/hang.py: a stack of layers under stage 3, where most is sent. With --trace the details of
a trace are noted too, which a run does for a few updates only. Rounds differ by more than the record takes where other
programs run, so its own functions are timed as well, without what they call: microseconds of updates that are noted and
of those that are not, and of the thread that sums up and writes.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.watched import compare, launch, small_job

_SETTLING = 60  # steps between a change and what is measured


class _Stopwatch:
    """Time in functions, without what is timed inside them."""

    def __init__(self) -> None:
        self.own_ns, self._inside = 0, [0]

    def around(self, function: Callable[..., Any], *, counted: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter_ns()
            self._inside.append(0)
            try:
                return function(*args, **kwargs)
            finally:
                inside, whole = self._inside.pop(), time.perf_counter_ns() - begun
                self._inside[-1] += whole
                self.own_ns += counted * (whole - inside)

        timed.__name__ = getattr(function, "__name__", "")
        return timed


def _time_notes(patch: pytest.MonkeyPatch, watch: _Stopwatch) -> None:
    """Let ``watch`` time the functions of observers that begin from here on."""
    from deepspeed.profiling.timeline.listen import Listener, Wraps
    from deepspeed.profiling.timeline.observer import Observer

    put = Wraps.put

    def timed_put(self: Any, owner: Any, name: str, call: Any, *given: Any) -> None:
        def outer(*args: Any, **kwargs: Any) -> Any:
            *first, method = args[: len(given) + 1]
            return call(*first, watch.around(method, counted=False), *args[len(given) + 1 :], **kwargs)

        return put(self, owner, name, watch.around(outer, counted=True), *given)

    def with_its_end(hear: Any) -> Any:
        def timed(*args: Any) -> Any:
            end = hear(*args)
            return None if end is None else watch.around(end, counted=True)

        return timed

    for name in ("_collective", "_event", "_phase"):
        patch.setattr(Listener, name, watch.around(with_its_end(getattr(Listener, name)), counted=True))
    patch.setattr(Observer, "_boundary", watch.around(Observer._boundary, counted=True))
    patch.setattr(Wraps, "put", timed_put)


def _own(engine: Any, steps: Any, count: int) -> None:
    """Print what the functions of the record take."""
    from deepspeed.profiling.timeline.observer import Observer

    watch, own = _Stopwatch(), {True: list[float](), False: list[float]()}
    with pytest.MonkeyPatch.context() as patch:
        _time_notes(patch, watch)
        observer = Observer(engine)
        (thread,) = (t.native_id for t in threading.enumerate() if t.name == "deepspeed-observe")
        for _ in range(10):
            steps(1)

        def cpu_ns() -> int:
            return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])

        begun, writes, walls = time.thread_time(), cpu_ns(), []
        for _ in range(count):
            watch.own_ns, noted = 0, not observer._listener._resting
            walls.append(steps(1)[0] * 1e3)
            own[noted].append(watch.own_ns / 1e3)
        step_us = (time.thread_time() - begun) / count * 1e6
        writes_us = (cpu_ns() - writes) / count / 1e3
        observer.close()
    shares = {noted: (len(each) / count, statistics.median(each)) for noted, each in own.items() if each}
    mean = sum(share * each for share, each in shares.values())
    if engine.mesh.job.index == 0:
        for noted, (share, each) in shares.items():
            print(f"{'heard' if noted else 'phases alone'}: {share:.0%} of the updates, {each:.0f} us each")
        print(
            f"the record itself: {mean:.0f} us a step, its thread {writes_us:.0f} us, which is "
            f"{(mean + writes_us) / step_us:.1%} of the {step_us / 1e3:.1f} ms of the processor that the thread that "
            f"trains takes; {statistics.median(walls):.1f} ms by the clock",
            flush=True,
        )


def train(options: argparse.Namespace) -> None:
    """One rank: rounds of steps without and with an observer."""
    from deepspeed.profiling.timeline.observer import Observer

    engine, steps = small_job(options)
    settings = engine._config.observe.model_copy(update={"run": options.folder})
    engine._config = engine._config.model_copy(update={"observe": settings})

    def settled() -> tuple[float, float, float]:
        steps(_SETTLING)  # the interpreter meets methods that have been replaced, and takes a while to be fast again
        return steps()

    def watched() -> tuple[float, float, float]:
        observer = Observer(engine)
        if options.trace:
            observer._listener.detail()
        seconds = settled()
        observer._listener.less()
        observer.close()
        return seconds

    _own(engine, steps, options.updates)
    compare(options.rounds, settled, watched, shown=engine.mesh.job.index == 0)
    engine.destroy()


def main() -> int:
    """The job, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"ranks": 2, "layers": 12, "width": 256, "rounds": 12, "steps": 60, "updates": 300}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()  # a launcher adds --local_rank
    if options.folder:
        train(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{name}={getattr(options, name)}" for name in defaults] + ["--trace"] * options.trace
        done = launch(options.ranks, str(Path(__file__).resolve()), *words, f"--folder={folder}", folder=folder)
    sys.stdout.write(done.stdout if done.returncode == 0 else done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
