"""File IO: our engine's backends, by the loop of ``ds_bench io``, beside fio (io_uring and libaio, 1 MiB blocks, queue
32, O_DIRECT), each on a file of its own in one folder, reads and writes.

    python benchmarks/io.py [--folder .] [--rounds 5] [--seconds 3] [--reference-python PATH] [--only handle]

Contenders alternate; medians in GB/s and the ratio to fio's best. fio must be installed and has its default buffers, of
4 KiB pages; ours are of huge pages, which is most of the difference. With --reference-python our ``aio_handle`` and the
reference's take turns too, on a file of 256 MiB that each writes or reads whole (``peers/aio_handle.py``).
"""

import argparse
import collections
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import harmonic_mean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deepspeed.tools.bench.io import Load, Target, speed, through_engine

ROOT = Path(__file__).resolve().parent.parent
SIZE = 1 << 30


def ours(target: Target, backend: str, *, write: bool, seconds: float) -> float:
    """GB/s of whole passes, by the loop of ``ds_bench io``."""
    load, rates, begin = Load(backend=backend), [], time.monotonic()
    with load.engine() as engine:
        while time.monotonic() - begin < seconds:
            rates.append(speed(target, engine, load, write=write))
    return harmonic_mean(rates)


def fio(path: str, engine: str, *, write: bool, seconds: float) -> float:
    """GB/s of fio with the same block size and queue."""
    command = [
        "fio",
        "--name=x",
        f"--filename={path}",
        f"--rw={'write' if write else 'read'}",
        "--bs=1M",
        "--iodepth=32",
        "--direct=1",
    ]
    command += [
        f"--ioengine={engine}",
        f"--size={SIZE}",
        "--time_based",
        f"--runtime={seconds}",
        "--output-format=json",
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = json.loads(out[out.index("{") :])["jobs"][0]
    return float(job["write" if write else "read"]["bw_bytes"]) / 1e9


def handle(python: str, path: str, *, write: bool, seconds: float) -> float:
    """GB/s of the ``aio_handle`` of the package that ``python`` imports."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    if python == sys.executable:
        env["PYTHONPATH"] = str(ROOT)
    else:  # its just-in-time builds look for ninja on the PATH
        env["PATH"] = f"{Path(python).absolute().parent}{os.pathsep}{env['PATH']}"
    command = [
        python,
        str(ROOT / "benchmarks" / "peers" / "aio_handle.py"),
        path,
        "write" if write else "read",
        str(seconds),
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    return float(out.rpartition("RESULT ")[2])


def handles(args: argparse.Namespace, path: str) -> None:
    """Alternate and print."""
    peers = {"ours": sys.executable, "reference": args.reference_python}
    with open(path, "wb") as file:
        file.write(bytes(256 << 20))
    try:
        for write in (True, False):
            rates = collections.defaultdict(list)
            for turn in range(args.rounds):
                for name in list(peers)[:: 1 if turn % 2 else -1]:
                    rates[name].append(handle(peers[name], path, write=write, seconds=args.seconds))
            ours_, theirs = median(rates["ours"]), median(rates["reference"])
            print(
                f"aio_handle {'write' if write else 'read':<6}ours {ours_:.2f} GB/s, reference {theirs:.2f} "
                f"GB/s: {ours_ / theirs:.2f}"
            )
    finally:
        os.unlink(path)


def main() -> None:
    """Parse, alternate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--reference-python", help="interpreter of an environment with the reference")
    parser.add_argument("--only", choices=("fio", "handle"))
    args = parser.parse_args()
    if args.reference_python and args.only != "fio":
        handles(args, os.path.join(args.folder, "ds_bench_io_handle.tmp"))
    if args.only == "handle":
        return
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed; ds_io measures without it")
    path = os.path.join(args.folder, "ds_bench_io.tmp")  # of fio, which fills it before it measures
    rates: dict[tuple[str, bool], list[float]] = collections.defaultdict(list)
    with contextlib.closing(Target(args.folder, SIZE)) as target:
        with Load().engine() as engine:
            through_engine(target, engine, Load(), write=True)
        try:
            for _ in range(args.rounds):
                for write in (False, True):
                    for engine_name in ("io_uring", "libaio"):
                        found = fio(path, engine_name, write=write, seconds=args.seconds)
                        rates[f"fio {engine_name}", write].append(found)
                    for backend in ("io_uring", "libaio", "threads"):
                        found = ours(target, backend, write=write, seconds=args.seconds)
                        rates[f"ours {backend}", write].append(found)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    for write in (False, True):
        best = max(median(v) for (name, w), v in rates.items() if w is write and name.startswith("fio"))
        for (name, w), values in rates.items():
            if w is write:
                print(
                    f"{'write' if write else 'read':<6}{name:<16}{median(values):7.2f} GB/s   "
                    f"{median(values) / best:.2f} of fio's best"
                )


if __name__ == "__main__":
    main()
