"""What it brings that gloo's threads wait for their turn on a busy processor (``deepspeed.comm.init.take_turns``).

    python benchmarks/gloo_turns.py [--ranks 2 4] [--layers 12] [--width 256] [--rounds 12] [--steps 10] [--threads 1]
                                    [--beside 0]

A stack of layers under stage 3 on CPU ranks, rounds without and with it in turn in one engine: milliseconds of a step
by the clock, and of the processor of a rank. ``--beside``: so many programs that compute without a pause run meanwhile.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.watched import compare, launch, small_job


def train(options: argparse.Namespace) -> None:
    """One rank."""
    from deepspeed.comm.init import take_turns

    engine, steps = small_job(options)

    def without() -> tuple[float, float, float]:
        take_turns(os.SCHED_OTHER)
        return steps()

    def turns() -> tuple[float, float, float]:
        take_turns()
        return steps()

    compare(options.rounds, without, turns, shown=engine.mesh.job.index == 0)
    engine.destroy()


def main() -> int:
    """The jobs, or one rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"layers": 12, "width": 256, "rounds": 12, "steps": 10, "threads": 1, "beside": 0}
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()  # a launcher adds --local_rank
    if options.rank:
        train(options)
        return 0
    script, failed = str(Path(__file__).resolve()), 0
    words = ["--rank", *(f"--{name}={getattr(options, name)}" for name in defaults)]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for _ in range(options.beside):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        for ranks in options.ranks:
            print(f"{ranks} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
            done = launch(ranks, script, *words, folder=folder, threads=options.threads)
            sys.stdout.write(done.stdout if done.returncode == 0 else done.stderr)
            failed |= done.returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
