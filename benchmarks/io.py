"""File IO: our engine's backends beside fio (io_uring and libaio, 1 MiB blocks, queue 32, O_DIRECT) on one file, reads and writes.

    python benchmarks/io.py [--folder .] [--rounds 5] [--seconds 3]

Contenders alternate; medians in GB/s and the ratio to fio's best. fio must be installed and has its default buffers, of 4 KiB pages; ours
are of huge pages, which is most of the difference.
"""

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CHUNK, AHEAD, SIZE = 32 << 20, 4, 1 << 30


def ours(path: str, backend: str, *, write: bool, seconds: float) -> float:
    """GB/s of 32 MiB transfers, four under way."""
    from deepspeed.tier.aio import AioEngine, DirectFile, aligned_empty

    with AioEngine(backend=backend) as engine, DirectFile(path) as file:
        buffers = [aligned_empty(CHUNK).fill_(3) for _ in range(AHEAD)]
        pending, moved, begin, i = collections.deque(), 0, time.monotonic(), 0
        while time.monotonic() - begin < seconds:
            if len(pending) == AHEAD:
                transfer = pending.popleft()
                transfer.wait()
                moved += transfer.nbytes
            pending.append((engine.write if write else engine.read)(file, i % (SIZE // CHUNK) * CHUNK, buffers[i % AHEAD]))
            i += 1
        for transfer in pending:
            transfer.wait()
            moved += transfer.nbytes
        return moved / (time.monotonic() - begin) / 1e9


def fio(path: str, engine: str, *, write: bool, seconds: float) -> float:
    """GB/s of fio with the same block size and queue."""
    command = ["fio", "--name=x", f"--filename={path}", f"--rw={'write' if write else 'read'}", "--bs=1M", "--iodepth=32", "--direct=1"]
    command += [f"--ioengine={engine}", f"--size={SIZE}", "--time_based", f"--runtime={seconds}", "--output-format=json"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = json.loads(out[out.index("{") :])["jobs"][0]
    return float(job["write" if write else "read"]["bw_bytes"]) / 1e9


def main() -> None:
    """Parse, alternate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed; ds_io measures without it")
    path = os.path.join(args.folder, "ds_bench_io.tmp")
    with open(path, "wb") as file:
        for _ in range(SIZE // CHUNK):
            file.write(os.urandom(1 << 20) * (CHUNK >> 20))
    try:
        rates: dict[tuple[str, bool], list[float]] = collections.defaultdict(list)
        for _ in range(args.rounds):
            for write in (False, True):
                for engine in ("io_uring", "libaio"):
                    rates[f"fio {engine}", write].append(fio(path, engine, write=write, seconds=args.seconds))
                for backend in ("io_uring", "libaio", "threads"):
                    rates[f"ours {backend}", write].append(ours(path, backend, write=write, seconds=args.seconds))
    finally:
        os.unlink(path)
    for write in (False, True):
        best = max(median(v) for (name, w), v in rates.items() if w is write and name.startswith("fio"))
        for (name, w), values in rates.items():
            if w is write:
                print(f"{'write' if write else 'read':<6}{name:<16}{median(values):7.2f} GB/s   {median(values) / best:.2f} of fio's best")


if __name__ == "__main__":
    main()
