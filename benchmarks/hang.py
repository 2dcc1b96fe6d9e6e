"""What the watch over a job that may stand still costs, and how soon it names each fault.

    python benchmarks/hang.py overhead [--ranks 2] [--layers 12] [--width 256] [--rounds 15] [--steps 10]
    python benchmarks/hang.py faults [--ranks 2 3 4] [--runs 10] [--limit 2] [--only loops stops]

The first trains a stack of layers under stage 3, where most is sent, and switches the watch on and off between rounds
of the same engine: seconds of the clock and of the processor, which differ between rounds by more than the watch takes;
and what the watch itself takes, entries of collectives and its two threads, by the processor time of each. The second
starts jobs of which rank 1 goes wrong (tests/harness/stuck.py), and prints the seconds from the fault to the end of the
job beside the limit and five seconds, and how many reports named rank and place.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.watched import compare, launch, small_job

_TRIES = 5


def _own_ms(guard: Any, groups: Any, steps: Any, count: int) -> tuple[float, float, float]:
    """Entries a step, and processor milliseconds that they and the watch's threads take of it."""
    spent = {"entries": 0.0, "threads": 0.0, "collectives": 0.0}
    looking = statistics.median(-(time.thread_time() - time.thread_time()) for _ in range(1000))  # takes its time, too

    def timed(function: Any, what: str) -> Any:
        def call(*arguments: Any, **words: Any) -> Any:
            begun = time.thread_time()
            answer = function(*arguments, **words)
            spent[what] += time.thread_time() - begun - looking
            return answer

        return call

    def begins(listener: Any) -> Any:
        begin = timed(listener, "entries")

        def call(*arguments: Any) -> Any:
            end = begin(*arguments)
            spent["collectives"] += end is not None
            return end and timed(end, "entries")

        return call

    for group in groups:
        group.ledger[:] = map(begins, group.ledger)
    for name in ("_exchange", "_glance", "_waits_too_long"):
        setattr(guard, name, timed(getattr(guard, name), "threads"))
    steps()
    return spent["collectives"] / count, spent["entries"] / count * 1e3, spent["threads"] / count * 1e3


def train(options: argparse.Namespace) -> None:
    """One rank: rounds of steps without and with the watch."""
    from deepspeed.comm.hang.watch import watch

    engine, steps = small_job(options)
    mesh = engine.mesh
    groups = {id(g): g for g in (mesh.job, mesh.data, mesh.zero, mesh.control, *mesh.groups) if g is not None}

    def begun() -> Any:
        guard = watch(3600.0)
        assert guard is not None
        guard.follow(engine)
        steps()  # a watch that begins meets every place for the first time
        return guard

    def watched() -> tuple[float, float, float]:
        guard = begun()
        seconds = steps()
        guard.stop()
        for group in groups.values():
            group.ledger.clear()
        return seconds

    step = compare(options.rounds, steps, watched, shown=mesh.job.index == 0)
    count, entries, threads = _own_ms(begun(), groups.values(), steps, options.steps)
    if mesh.job.index == 0:
        print(
            f"the watch itself: {count:.0f} entries a step {entries:.3f} ms, its threads {threads:.3f} ms: "
            f"{(entries + threads) / step:.2%} of a step's processor time"
        )
    engine.destroy()


def overhead(options: argparse.Namespace) -> None:
    """The job of ``train``."""
    sizes = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "rounds", "steps")]
    with tempfile.TemporaryDirectory() as folder:
        done = launch(options.ranks[0], str(Path(__file__).resolve()), "train", *sizes, folder=folder)
    print(done.stdout.strip() if done.returncode == 0 else done.stderr)
    sys.exit(done.returncode)


def faults(options: argparse.Namespace) -> None:
    """Jobs that stand still."""
    from deepspeed.errors import JobHungError
    from tests.harness.stuck import FAULTS, SCRIPT, WORDS, ends_at_once

    if unknown := sorted(set(options.only or ()) - set(WORDS)):
        sys.exit(f"--only {' '.join(unknown)}: no such fault; there are {', '.join(WORDS)}")
    print(
        f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; limit {options.limit:g} s, so at most "
        f"{options.limit + 5:g} s"
    )
    print(f"{'fault':18}{'ranks':>6}{'runs':>6}{'median s':>10}{'worst s':>9}{'in time':>9}{'named':>7}  what")
    for fault in options.only or WORDS:
        for ranks in options.ranks:
            seconds, named = [], 0
            for _ in range(options.runs):
                for _ in range(_TRIES):
                    with tempfile.TemporaryDirectory() as folder:
                        done = launch(ranks, SCRIPT, fault, "--folder", folder, folder=folder, limit=options.limit)
                        ended, moment = time.time(), Path(folder) / "fault"
                        if moment.exists():
                            seconds.append(ended - float(moment.read_text()))
                            break
                    print(f"{fault}: ended before the fault, as the machine is too busy for this limit; tried again")
                else:
                    sys.exit(done.stderr)
                report = done.stderr[done.stderr.rfind("deepspeed: the job stands still") :]
                hung = done.returncode == JobHungError.exit_status and re.search(WORDS[fault][0], report) is not None
                right = hung or ends_at_once(fault, done.returncode, done.stderr)
                named += right
                if not right:
                    print(f"{fault}: status {done.returncode}, and not named:\n{done.stderr[-4000:]}", flush=True)
            early = sum(s <= options.limit + 5 for s in seconds)
            print(
                f"{fault:18}{ranks:>6}{options.runs:>6}{statistics.median(seconds):>10.1f}{max(seconds):>9.1f}"
                f"{early:>6}/{options.runs:<2}{named:>4}/{options.runs:<2}  {FAULTS[fault]}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "faults", "train"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    for name, default in (("layers", 12), ("width", 256), ("rounds", 15), ("steps", 10), ("runs", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", type=float, default=2.0)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--local_rank", type=int)
    options = parser.parse_args()
    {"overhead": overhead, "faults": faults, "train": train}[options.what](options)


if __name__ == "__main__":
    main()
