"""What the record of a run costs: processor time and clock of a step, with and without, alternating in one engine.

    python benchmarks/observe.py [--ranks 2] [--layers 12] [--width 256] [--rounds 12] [--steps 10] [--trace]

The job is that of benchmarks/hang.py: a stack of layers under stage 3, where most is sent. With --trace the details of
a trace are noted too, which a run does for a few updates only.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))


def train(options: argparse.Namespace) -> None:
    """One rank: rounds of steps without and with an observer."""
    import torch
    from torch import nn

    import deepspeed
    from deepspeed.timeline.observer import Observer

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(options.width, options.width), nn.Tanh()) for _ in range(options.layers)]
    config = {"train_micro_batch_size_per_gpu": 32, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}}
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(model=nn.Sequential(*layers), config=config)
    settings = engine._config.observe.model_copy(update={"run": options.folder})
    engine._config = engine._config.model_copy(update={"observe": settings})
    x = torch.randn(32, options.width)

    def steps() -> tuple[float, float]:
        torch.distributed.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(options.steps):
            engine.backward(engine(x).square().mean())
            engine.step()
        torch.distributed.barrier()
        return (time.perf_counter() - wall) / options.steps, (time.process_time() - processor) / options.steps

    for _ in range(3):
        steps()
    rounds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for index in range(2 * options.rounds):
        on = index % 4 in (1, 2)  # off, on, on, off: a drift of the machine meets both alike
        observer = Observer(engine) if on else None
        if observer is not None and options.trace:
            observer._listener.detail()
        rounds[on].append(steps())
        if observer is not None:
            observer._listener.less()
            observer.close()
    if engine.mesh.job.index == 0:
        for position, what in enumerate(("clock", "processor")):
            off, on_s = (statistics.median(r[position] for r in rounds[kind]) for kind in (False, True))
            sys.stdout.write(
                f"{what}: {off * 1e3:.2f} ms a step without, {on_s * 1e3:.2f} ms with: {on_s / off - 1:+.2%}\n"
            )
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
    threads = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(HERE)}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "DS_"))} | threads
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{name}={getattr(options, name)}" for name in defaults] + ["--trace"] * options.trace
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(options.ranks)]
        command += [str(Path(__file__).resolve()), *words, f"--folder={folder}"]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout if done.returncode == 0 else done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
