"""A model that does not fit: train it with parameters, gradients and optimizer state on a drive, under a hard memory
limit.

    python benchmarks/nvme.py train --layers 51 --steps 5       the headline: 1.0 billion parameters in 3 GiB
    python benchmarks/nvme.py train --unstated                 without a memory block: the engine measures what there is
    python benchmarks/nvme.py depth --layers 12 48             the peak must not grow with depth
    python benchmarks/nvme.py speed                            the step against compute alone and the drive's bandwidth
    python benchmarks/nvme.py train --layers 6 --trace t.json  the engine's trace: phases, reads and writes

The limit is a memory cgroup where one can be made (page cache counts there too), else resident memory is watched and
the run is stopped above it. The data are the Python sources of the standard library.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


def config(folder: str, limit_mib: int, *, offload: bool = True, stated: bool = True) -> dict[str, Any]:
    """Everything on the drive, bf16 with fp32 master weights and moments; not ``stated``: as much of it as the memory
    there is demands.
    """
    drive = {"device": "nvme", "nvme_path": folder}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 20_000}
    if offload:
        zero |= {"offload_optimizer": drive, "offload_param": {**drive, **({"max_in_cpu": 0} if stated else {})}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": zero,
        "memory": {"host_limit": limit_mib * MIB} if offload and stated else {},
    }


def child(args: argparse.Namespace) -> None:
    """One run; prints one JSON object."""
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    import torch
    from gpt import GPT, GPTConfig
    from train_gpt import Corpus

    import deepspeed
    from deepspeed.monitor import hostmem

    begin = time.monotonic()
    cfg = config(args.folder, args.limit, offload=not args.in_memory, stated=not args.unstated)
    cfg |= {"observe": {"trace": args.trace, "steps": [1, args.steps]}} if args.trace else {}
    shape = GPTConfig(
        vocab=256, context=args.context, width=args.width, layers=args.layers, heads=args.width // 64, checkpoint=True
    )
    torch.manual_seed(0)
    remote = None if args.in_memory else "nvme"
    with deepspeed.zero.Init(remote_device=remote, config_dict_or_path=cfg):
        model = GPT(shape)
    engine, *_ = deepspeed.initialize(model=model, config=cfg)
    built = time.monotonic() - begin
    corpus = Corpus(args.context, seed=0)
    losses, forwards, updates, steps = [], [], [], []
    drives = engine._parts.tiers.drives
    moved = []
    for _ in range(args.steps):
        before = sum(d.read_bytes + d.written_bytes for d in drives)
        t0 = time.monotonic()
        ids, targets = corpus.batch(0, 1)  # one batch again and again: the loss must fall
        loss = engine(ids, targets)
        engine.backward(loss)
        t1 = time.monotonic()
        engine.step()
        t2 = time.monotonic()
        losses.append(round(loss.item(), 4))
        forwards.append(t1 - t0)
        updates.append(t2 - t1)
        steps.append(t2 - t0)
        moved.append(sum(d.read_bytes + d.written_bytes for d in drives) - before)
        print(
            f"step {len(losses)}: loss {losses[-1]}, {t2 - t0:.1f} s, peak {hostmem.peak_rss_bytes() / MIB:.0f} MiB",
            file=sys.stderr,
        )
    numel = sum(p.numel() for p in model.parameters())
    found = {
        "parameters": numel,
        "losses": losses,
        "build_s": round(built, 2),
        "step_s": round(median(steps[1:] or steps), 3),
        "forward_backward_s": round(median(forwards[1:] or forwards), 3),
        "update_s": round(median(updates[1:] or updates), 3),
        "moved_gib": round(median(moved[1:] or moved) / 2**30, 3),
        "peak_rss_mib": round(hostmem.peak_rss_bytes() / MIB),
        "plan_host_mib": round(engine.memory_plan().host / MIB),
        "backend": drives[0].backend if drives else "-",
    }
    print(json.dumps(found))


class Limit:
    """A memory cgroup of its own for one child, or a watch over its resident memory."""

    def __init__(self, mib: int) -> None:
        self.mib = mib
        self.how = "resident memory is watched"
        self._folder: Path | None = None
        for base, names in (
            ("/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")),
            ("/sys/fs/cgroup", ("memory.max",)),
        ):
            if self._make(Path(base) / f"ds_bench_{os.getpid()}", names):
                break

    def _make(self, folder: Path, names: tuple[str, ...]) -> bool:
        try:
            folder.mkdir()
        except OSError:
            return False
        try:
            (folder / names[0]).write_text(str(self.mib * MIB))
        except OSError:
            folder.rmdir()
            return False
        self._folder, self.how = folder, f"cgroup {folder}/{names[0]}"
        return True

    def enter(self) -> None:
        """Called in the child before it becomes the program."""
        if self._folder is not None:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def watch(self, process: subprocess.Popen[str]) -> None:
        """Stop the child when it holds more than the limit."""
        while process.poll() is None:
            try:
                held = psutil.Process(process.pid).memory_info().rss
            except psutil.NoSuchProcess:
                return
            if held > self.mib * MIB:
                process.kill()
                print(f"stopped: {held / MIB:.0f} MiB resident, the limit is {self.mib}", file=sys.stderr)
                return
            time.sleep(0.05)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.rmdir()


def run(args: argparse.Namespace, layers: int, *, in_memory: bool = False, limit: int | None = None) -> dict[str, Any]:
    """One child under the limit; raises SystemExit when it dies."""
    bound = Limit(limit or args.limit)
    command = [
        sys.executable,
        __file__,
        "child",
        "--folder",
        args.folder,
        "--limit",
        str(bound.mib),
        "--layers",
        str(layers),
    ]
    command += ["--width", str(args.width), "--context", str(args.context), "--steps", str(args.steps)]
    command += ["--in-memory"] if in_memory else []
    command += ["--unstated"] if args.unstated else []
    command += ["--trace", args.trace] if args.trace else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=bound.enter)
    watcher = threading.Thread(target=bound.watch, args=(process,))
    watcher.start()
    out, _ = process.communicate(timeout=args.timeout)
    watcher.join()
    bound.close()
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode} under {bound.mib} MiB ({bound.how})")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return {"layers": layers, "limit": f"{bound.mib} MiB: {bound.how}", **found}


def drive_gbs(folder: str) -> tuple[float, float]:
    """Read and write GB/s of the drive through the IO engine, as ``ds_bench io`` measures them."""
    sys.path.insert(0, str(ROOT))
    from deepspeed.tools.bench.io import Load, Target, speed, through_engine

    load = Load()
    rates: dict[bool, list[float]] = {True: [], False: []}
    with load.engine() as engine, contextlib.closing(Target(folder, 1 << 30)) as target:
        through_engine(target, engine, load, write=True)
        for _ in range(3):
            for write in (True, False):
                rates[write].append(speed(target, engine, load, write=write))
    return median(rates[False]), median(rates[True])


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "depth", "speed", "child"))
    parser.add_argument("--layers", type=int, nargs="*", default=None)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=int, default=3072, help="MiB")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--timeout", type=float, default=3000)
    parser.add_argument("--in-memory", action="store_true")
    parser.add_argument("--unstated", action="store_true", help="no memory block: the engine measures what there is")
    parser.add_argument("--trace", default="", help="write a Chrome trace there")
    args = parser.parse_args()
    if args.what == "child":
        args.layers = args.layers[0]
        child(args)
        return
    with tempfile.TemporaryDirectory(prefix="ds_nvme_") as own:
        args.folder = args.folder or own
        if args.what == "train":
            print(json.dumps(run(args, (args.layers or [51])[0]), indent=1))
        elif args.what == "depth":
            found = [run(args, layers) for layers in args.layers or (12, 48)]
            print(json.dumps(found, indent=1))
            print(f"peak ratio {found[-1]['peak_rss_mib'] / found[0]['peak_rss_mib']:.3f}")
        else:
            speed(args)


def speed(args: argparse.Namespace) -> None:
    """Step time against max(compute, bytes / bandwidth), medians of alternating runs."""
    layers = (args.layers or [6])[0]
    away, here, disk = [], [], []
    for _ in range(3):
        disk.append(drive_gbs(args.folder))
        away.append(run(args, layers))
        here.append(run(args, layers, in_memory=True, limit=16_384))
    read, write = median(r for r, _ in disk), median(w for _, w in disk)
    step, compute = median(a["step_s"] for a in away), median(h["step_s"] for h in here)
    moved = away[0]["moved_gib"] * 2**30 / 1e9
    bound = max(compute, moved / 2 / read + moved / 2 / write)
    print(
        f"drive read {read:.2f} GB/s, write {write:.2f} GB/s; {moved:.2f} GB a step; in memory {compute:.2f} "
        f"s; bound {bound:.2f} s"
    )
    print(f"step {step:.2f} s = {step / bound:.2f} x bound (limit 1.2)")


if __name__ == "__main__":
    main()
