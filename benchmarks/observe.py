"""What the record of a run costs: processor time and clock of a step, with and without, alternating in one engine.

    python benchmarks/observe.py [--ranks 2] [--layers 12] [--width 256] [--rounds 12] [--steps 10] [--trace]

The job is that of benchmarks/hang.py: a stack of layers under stage 3, where most is sent. With --trace the details of
a trace are noted too, which a run does for a few updates only.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.watched import compare, launch, small_job


def train(options: argparse.Namespace) -> None:
    """One rank: rounds of steps without and with an observer."""
    from deepspeed.timeline.observer import Observer

    engine, steps = small_job(options)
    settings = engine._config.observe.model_copy(update={"run": options.folder})
    engine._config = engine._config.model_copy(update={"observe": settings})

    def settled() -> tuple[float, float, float]:
        steps()  # the interpreter meets methods that have been replaced
        return steps()

    def watched() -> tuple[float, float, float]:
        observer = Observer(engine)
        if options.trace:
            observer._listener.detail()
        seconds = settled()
        observer._listener.less()
        observer.close()
        return seconds

    compare(options.rounds, settled, watched, shown=engine.mesh.job.index == 0)
    engine.destroy()


def main() -> int:
    """The job, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"ranks": 2, "layers": 12, "width": 256, "rounds": 12, "steps": 10}
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
