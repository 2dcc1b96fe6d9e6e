"""One rank of ``benchmarks/checkpoint.py``: an engine that saves, loads and trains as its standard input says.

Every line of input is a JSON object, the same for all ranks: {"do": a method of ``Rank``, ...its arguments}; the answer
is a line
"RESULT {...}". All times run from a barrier to a barrier, so they are the slower rank's.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine import config_for
from measure import memory_mib
from models import WORKLOADS, build_model, make_batch
from torch import Tensor
from torch.distributed import checkpoint as dcp

MIB = 1 << 20
BLOCK, AHEAD = 8 * MIB, 4
TAG = "bench"


def files_in(folder: Path) -> list[Path]:
    """Every regular file below ``folder``."""
    return sorted(p for p in folder.rglob("*") if p.is_file())


def on_disk(folder: Path) -> None:
    """fsync every file below ``folder``; costs next to nothing where that was done before."""
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def cache(folder: Path, state: str) -> None:
    """Bring the files below ``folder`` into the page cache ("warm") or out of it ("cold")."""
    buffer = bytearray(BLOCK)
    for path in files_in(folder):
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while state == "warm" and file.readinto(buffer):
                pass


class Rank:
    """The engine of this process, of this project or of the reference, and what the driver asks of it."""

    def __init__(self, package: Any, args: argparse.Namespace) -> None:
        self.workload = WORKLOADS[args.model]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.base = memory_mib("VmRSS")
        settings = argparse.Namespace(variant=args.variant, level=3)
        config = config_for(settings, self.workload)
        with package.zero.Init(config_dict_or_path=config):
            model = build_model(self.workload)
        self.largest = max(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        self.engine = package.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        self.count = 0
        self.aside = dist.new_group(backend="gloo")  # for collectives of a background thread

    def ready(self) -> dict[str, Any]:
        """Nothing but an answer; ``largest``: bytes of the largest tensor."""
        return {"largest": 4 * self.largest}

    # -- training -------------------------------------------------------------------------------------------------
    def step(self) -> None:
        """One optimizer step on fresh random tokens."""
        inputs, targets = make_batch(self.workload, self.rank, self.count)
        loss = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        self.count += 1

    def train(self, steps: int, save: str = "") -> dict[str, Any]:
        """Seconds of ``steps`` steps, and of processor time; with ``save`` an asynchronous save begins before the first
        and must end.
        """
        begin = time.process_time()
        seconds = self._timed(lambda: self._train(steps, save))
        return {"s": seconds, "cpu": time.process_time() - begin}

    def _train(self, steps: int, save: str) -> None:
        if save:
            self._async(save)
        for _ in range(steps):
            self.step()
        if save:
            self.engine.wait_for_checkpoint()

    # -- saving ---------------------------------------------------------------------------------------------------
    def save(self, how: str, folder: str) -> dict[str, Any]:
        """Seconds until the call returns and until the bytes are on the disk; the bytes written by all ranks."""
        path = Path(folder)
        if self.rank == 0:
            path.mkdir(parents=True)
        state = {} if how == "engine" else self._shards()
        call = {
            "engine": lambda: self.engine.save_checkpoint(folder, tag=TAG),
            "torch": lambda: self._torch(path, state),
            "dcp": lambda: dcp.save(state, checkpoint_id=path),
        }
        returned = self._timed(call[how])
        durable = self._timed(lambda: on_disk(path) if self.rank == 0 else None)
        return {"s": returned, "disk_s": returned + durable, "bytes": sum(p.stat().st_size for p in files_in(path))}

    def _shards(self) -> dict[str, Tensor]:
        """This rank's fp32 weights and optimizer slots, the engine's own memory, under names that no other rank
        uses.
        """
        from deepspeed.checkpoint.save.collect import weight_parts

        parts = weight_parts(self.engine._checkpoints.states(), without=set())
        return {f"{p.state}/{p.name}@{self.rank}+{p.lo}": p.values for p in parts}

    def _torch(self, folder: Path, state: dict[str, Tensor]) -> None:
        path = folder / f"{self.rank}.pt"
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def write(self, folder: str, nbytes: int) -> dict[str, Any]:
        """Seconds for every rank to bring a new file of ``nbytes`` to the disk around the page cache, and to read it:
        the disk's speed.
        """
        from deepspeed.tier.aio import AioEngine, DirectFile, aligned_empty

        buffers = [aligned_empty(BLOCK).fill_(3 + self.rank) for _ in range(AHEAD)]
        path, blocks = Path(folder) / f"{self.rank}.raw", max(1, nbytes // BLOCK)
        if self.rank == 0:
            path.parent.mkdir(parents=True)
        dist.barrier()

        def work(*, read: bool) -> None:
            with AioEngine() as engine, DirectFile(path, create=True) as file:
                pending: deque[Any] = deque()
                for index in range(blocks):
                    if len(pending) == AHEAD:
                        pending.popleft().wait()
                    move = engine.read if read else engine.write
                    pending.append(move(file, index * BLOCK, buffers[index % AHEAD]))
                while pending:
                    pending.popleft().wait()
                if not read:
                    fd = os.open(path, os.O_RDWR)
                    os.fsync(fd)
                    os.close(fd)

        written = self._timed(lambda: work(read=False))
        return {"s": written, "read_s": self._timed(lambda: work(read=True)), "bytes": blocks * BLOCK * self.world}

    # -- saving behind the training -------------------------------------------------------------------------------
    def hold(self, how: str, folder: str) -> dict[str, Any]:
        """Seconds that training is held, and until all is on the disk. ``clone`` and ``copy``: a copy of what must be
        copied, no more.
        """
        state = {} if how == "engine" else self._shards()
        kept: list[Any] = []
        there = [v.clone() for v in state.values()] if how == "copy" else []
        call: dict[str, Callable[[], Any]] = {
            "engine": lambda: self._async(folder),
            "copy": lambda: [to.copy_(v) for to, v in zip(there, state.values(), strict=True)],
            "clone": lambda: kept.extend([v.clone() for v in state.values()]),
            "dcp": lambda: kept.append(dcp.async_save(state, checkpoint_id=folder, process_group=self.aside)),
        }
        begin = time.perf_counter()
        held = self._timed(call[how])
        if how == "engine":
            self.engine.wait_for_checkpoint()
        if how == "dcp":
            kept[0].result()
        dist.barrier()
        return {"s": held, "end_s": time.perf_counter() - begin}

    def _async(self, folder: str) -> None:
        section = self.engine._config.checkpoint.__dict__
        section["async"] = True
        try:
            self.engine.save_checkpoint(folder, tag=TAG)
        finally:
            section["async"] = False

    # -- loading --------------------------------------------------------------------------------------------------
    def load(self, how: str, folder: str, pages: str) -> dict[str, Any]:
        """Seconds; the process's peak during it, and before it, above the base, in bytes."""
        path = Path(folder)
        state = {} if how == "engine" else self._shards()
        if self.rank == 0:
            cache(path, pages)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory_mib("VmRSS")
        call = {
            "engine": lambda: self.engine.load_checkpoint(folder, tag=TAG),
            "torch": lambda: self._torch_load(path, state),
            "dcp": lambda: dcp.load(state, checkpoint_id=path),
        }
        seconds = self._timed(call[how])
        peak = memory_mib("VmHWM")
        return {"s": seconds, "peak": (peak - self.base) * MIB, "before": (before - self.base) * MIB}

    def _torch_load(self, folder: Path, state: dict[str, Tensor]) -> None:
        found = torch.load(folder / f"{self.rank}.pt", weights_only=True)
        with torch.no_grad():
            for name, values in state.items():
                values.copy_(found[name])

    # -- common ---------------------------------------------------------------------------------------------------
    def _timed(self, work: Callable[[], Any]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - begin


def main() -> None:
    """Build, then answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--variant", choices=("default", "nvme"), default="default", help="where states rest")
    parser.add_argument("--reference", action="store_true", help="the package must be the reference, not this tree")
    args = parser.parse_args()
    torch.set_num_threads(1)
    package = importlib.import_module("deepspeed")
    here = Path(__file__).resolve().parents[2]
    if Path(package.__file__ or "").resolve().is_relative_to(here) is args.reference:
        raise SystemExit(f"deepspeed is {package.__file__}: the wrong one of the two; see benchmarks/README.md")
    package.init_distributed(dist_backend="gloo")
    rank = Rank(package, args)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(rank, order.pop("do"))(**order) or {}
        sys.stdout.write("RESULT " + json.dumps({"framework": f"DeepSpeed {package.__version__}", **answer}) + "\n")
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        dist.barrier()
    os._exit(0)  # frameworks' exit handlers are no part of the measurement


if __name__ == "__main__":
    main()
