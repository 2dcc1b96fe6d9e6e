"""An elastic job whose ranks write down every sample they train on, and what may happen to it.

Run as a script by the launcher: ``elastic.py FOLDER [--steps N] [--every N] [--pause S] [--fail MODE] [--fp16]``.
Before each update every rank leaves ``record/UPDATE.ROUND.RANK``: the samples of its part of the batch, the sum of
their losses, the learning rate and the loss scale.
"""

import argparse
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.harness.launched import environment

SAMPLES = 480  # ten epochs of 40 updates
BATCH = 12
CONFIG: dict[str, Any] = {
    "elasticity": {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [1, 2, 3], "max_gpus": 4},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
    "fp16": {"enabled": False},
    "zero_optimization": {"stage": 2},
    "checkpoint": {"keep_last": 2},
}


SPOILT = 200  # the sample of which fp16 has no finite loss, whatever the scale: its updates are left out
FP16: dict[str, Any] = CONFIG | {
    "fp16": {"enabled": True, "initial_scale_power": 3, "loss_scale_window": 7, "hysteresis": 1}
}


class Numbers(torch.utils.data.Dataset[Any]):
    """Sample ``i``: its number, and what is learnt from it, in ``dtype``."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        y = x.square().sum().view(1) * (1e6 if i == SPOILT and self._dtype == torch.float16 else 1)
        return i, x.to(self._dtype), y.to(self._dtype)


def train(
    folder: str, *, steps: int, every: int, pause: float = 0.0, fail: str = "", config: dict[str, Any] = CONFIG
) -> None:
    """Train ``steps`` updates on all ranks, going on from what is in ``folder``."""
    import deepspeed
    from deepspeed.elasticity import take_part

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    data = Numbers(torch.float16 if config["fp16"]["enabled"] else torch.float32)
    engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=data)
    if fail != "forgets":
        state = take_part(engine, f"{folder}/checkpoints", every=every)
        state["starts"] = state.get("starts", 0) + 1
    rank, attempt = int(os.environ.get("RANK", "0")), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if fail == "raises" and rank == 1:
        raise ValueError("the cause")
    ids, total = list[int](), 0.0
    while engine.global_steps < steps:
        for numbers, x, y in loader:
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            ids, total = [*ids, *numbers.tolist()], total + loss.item() * len(numbers)
            if engine.is_gradient_accumulation_boundary():
                made = [ids, total, engine.get_lr(), engine.loss_scale()]
                _record(Path(folder), f"{engine.global_steps}.{attempt}.{rank}", made)
                ids, total = [], 0.0
                time.sleep(pause)
            engine.step()
            if fail == "forgets" and engine.global_steps % every == 0 and not engine.micro_steps % 4:
                engine.save_checkpoint(f"{folder}/checkpoints")
            if engine.global_steps >= steps:
                break
    engine.destroy()


def _record(folder: Path, name: str, what: object) -> None:
    place = folder / "record"
    place.mkdir(exist_ok=True, parents=True)
    (place / f".{name}").write_text(json.dumps(what))
    os.rename(place / f".{name}", place / name)


def _last(folder: Path) -> dict[int, list[Any]]:
    """Update -> what each rank has left, of the last round that made it."""
    rounds: dict[int, dict[int, list[Any]]] = {}
    for file in (folder / "record").glob("[0-9]*.*.*"):
        step, attempt, _ = map(int, file.name.split("."))
        rounds.setdefault(step, {}).setdefault(attempt, []).append(json.loads(file.read_text()))
    return {step: made[max(made)] for step, made in rounds.items()}


def records(folder: Path) -> dict[int, tuple[list[int], float, int]]:
    """Update -> samples of all ranks, their mean loss, and the number of ranks."""
    return {
        step: (sorted(i for ids, *_ in ranks for i in ids), sum(t for _, t, *_ in ranks) / BATCH, len(ranks))
        for step, ranks in _last(folder).items()
    }


def settings(folder: Path) -> dict[int, tuple[list[float], float]]:
    """Update -> its learning rate and its loss scale, which are those of all ranks."""
    found = {step: [(lr, scale) for _, _, lr, scale in ranks] for step, ranks in _last(folder).items()}
    assert all(each == made[0] for made in found.values() for each in made)
    return {step: made[0] for step, made in found.items()}


class ElasticJob:
    """A ``deepspeed`` command with the flags for an elastic job, its output in ``out``, its temporary files in
    ``tmp``.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        words: tuple[str, ...] = (),
        enter: tuple[str, ...] = (),
        name: str = "job",
        program: tuple[str, ...] = ("deepspeed.launcher.runner", "--elastic_training"),
    ) -> None:
        """``enter``: what stands before the command; ``program``: another launcher."""
        self.folder, self.scratch, self.out = folder, folder / f"{name}.tmp", folder / f"{name}.out"
        self.scratch.mkdir(parents=True)
        env = environment(OMP_NUM_THREADS="1", TMPDIR=str(self.scratch))
        env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # torch makes it, and leaves it
        command = [*enter, sys.executable, "-m", *program, *flags]
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                [*command, __file__, str(folder), *words],
                cwd=folder,
                env=env,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(1, int(signal.SIGTERM)),  # ends with this process
            )

    def pids(self) -> dict[int, int]:
        """Local rank -> process, of this launcher."""
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                given = Path(f"/proc/{pid}/environ").read_bytes().decode()
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            match = re.search(r"(?:^|\0)LOCAL_RANK=(\d+)", given)
            if match and __file__ in line and parent == self.process.pid:
                found[int(match[1])] = int(pid)
        return found

    def updates(self) -> int:
        """How many updates have been made."""
        return len({file.name.split(".")[0] for file in (self.folder / "record").glob("[0-9]*.*.*")})

    def until(self, condition: Callable[[], object], what: str, limit_s: float = 120.0) -> None:
        """Wait, and fail with the job's output when it ends before."""
        end = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, f"the job ended before {what}:\n{self.out.read_text()}"
            assert time.monotonic() < end, f"waited {limit_s:g} s for {what}:\n{self.out.read_text()}"
            time.sleep(0.05)

    def finish(self, limit_s: float = 300.0, *, left: int = 0) -> tuple[int, str]:
        """Status and output; no process of it is left, and ``left`` temporary files: a host that dies cannot
        clean up.
        """
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the job has not ended within {limit_s:g} s:\n{self.out.read_text()}") from None
        text = self.out.read_text()
        assert not self.pids() and len(list(self.scratch.iterdir())) == left, text
        return status, text

    def kill(self, local: int, number: int = signal.SIGKILL) -> None:
        """Send ``number`` to one rank."""
        os.kill(self.pids()[local], number)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--fail", default="")
    parser.add_argument("--fp16", action="store_true")
    given = parser.parse_args()
    config = FP16 if given.fp16 else CONFIG
    train(given.folder, steps=given.steps, every=given.every, pause=given.pause, fail=given.fail, config=config)
