"""One AdamW step in host memory: our kernel, torch's fused one, a loop of the same traffic, and the reference's kernel.
"beside" is our kernel that leaves weights and moments alone and writes the new ones elsewhere.

    python benchmarks/cpu_adam.py [--dtypes float32 bfloat16] [--numel 50000000] [--threads 2] [--reference-python PATH]

GB/s count what an update must move: the moments (fp32) and the weights in and out, the gradient in: 28 bytes an element
where weights and gradient are fp32, 22 where they have 16 bits. Every contender is a process of its own that runs the
same loop; they take turns, each round in another order, and rest before each turn until the threads of the last one
sleep. Where a process finds its memory decides as much as its kernel, so all of them start several times. Medians over
all; a ratio below 1.00 means ours is faster.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = "reference"
NAMES = {
    "float32": ["ours", "beside", "torch", "loop", REFERENCE],
    "bfloat16": ["ours", REFERENCE],
    "float16": ["ours", REFERENCE],
}
# the idle threads of an OpenMP region spin for some milliseconds and would take a core from the next contender
REST_S = 0.05


def bytes_of(dtype: str) -> int:
    """Bytes that the update of one element moves."""
    return 16 + 3 * (4 if dtype == "float32" else 2)


def update_of(name: str, dtype: str, numel: int, threads: int) -> Callable[[], object]:
    """One update by the contender ``name``; in the environment of the reference ``deepspeed`` is the reference."""
    import torch

    torch.set_num_threads(threads)
    if name == "loop":
        from deepspeed.tools.bench import cpu_adam

        return cpu_adam.loop([torch.randn(numel) for _ in range(4)], threads, ThreadPoolExecutor(threads))
    if name == "beside":
        from deepspeed.optim.host import adam_step

        kept, made = ([torch.rand(numel) for _ in range(count)] for count in (4, 3))
        return lambda: adam_step(*kept, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=3, beside=made)
    param = torch.nn.Parameter(torch.randn(numel).to(getattr(torch, dtype)))
    param.grad = torch.randn(numel).to(param.dtype)
    if name == "torch":
        return torch.optim.AdamW([param], lr=1e-3, weight_decay=0.01, fused=True).step
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([param], lr=1e-3, weight_decay=0.01).step


def child(args: argparse.Namespace) -> None:
    """Seconds of one update, a line for each line on standard input."""
    update = update_of(args.child, args.dtypes[0], args.numel, args.threads)
    for _ in range(3):
        update()
    print("ready", flush=True)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    for _ in sys.stdin:
        begin = clock()
        update()
        print(clock() - begin, flush=True)


@contextlib.contextmanager
def contender(name: str, dtype: str, args: argparse.Namespace) -> Iterator[Callable[[], float]]:
    """A process that updates once a call and says how many seconds it took. Raises RuntimeError where it does not
    start.
    """
    python = args.reference_python if name == REFERENCE else Path(sys.executable)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": str(args.threads),
        "DS_ACCELERATOR": "cpu",
    }
    env["PATH"] = f"{python.absolute().parent}{os.pathsep}{env['PATH']}"
    if name != REFERENCE:
        env["PYTHONPATH"] = str(ROOT)
    command = [
        str(python),
        __file__,
        "--child",
        name,
        "--dtypes",
        dtype,
        "--numel",
        str(args.numel),
        "--threads",
        str(args.threads),
    ]
    command += ["--cpu-time"] if args.cpu_time else []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd="/"
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        requests, answers = process.stdin, process.stdout
        if not any(line.strip() == "ready" for line in iter(answers.readline, "")):
            raise RuntimeError(f"{name} did not start ({' '.join(command)}); its own message stands above")

        def ask() -> float:
            requests.write("\n")
            requests.flush()
            return float(answers.readline())

        yield ask
        requests.close()


def measure(dtype: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """GB/s of every round by contender."""
    names = [name for name in NAMES[dtype] if name != REFERENCE or args.reference_python.exists()]
    if args.cpu_time:
        names = [name for name in names if name != "loop"]  # it runs on a thread of its own
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.starts):
        with contextlib.ExitStack() as stack:
            asks = {name: stack.enter_context(contender(name, dtype, args)) for name in names}
            for index in range(args.rounds):
                turn = index % len(names)
                # every other round backwards: who follows whom changes too
                for name in (names[turn:] + names[:turn])[:: -1 if index % 2 else 1]:
                    time.sleep(REST_S)
                    rates[name].append(bytes_of(dtype) * args.numel / asks[name]() / 1e9)
        names = names[1:] + names[:1]
    return rates


def main() -> None:
    """Parse, take turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtypes", nargs="+", choices=sorted(NAMES), default=["float32", "bfloat16"], help="of weights and gradients"
    )
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="turns of every contender between two starts")
    parser.add_argument("--starts", type=int, default=5, help="fresh processes of every contender")
    parser.add_argument("--reference-python", type=Path, default=ROOT / ".bench" / "reference" / "bin" / "python")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="the thread's own clock: for a machine that is not idle, with --threads 1",
    )
    parser.add_argument("--child", choices=NAMES["float32"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time sees one thread; give --threads 1")
    if args.child:
        child(args)
        return
    for dtype in args.dtypes:
        load = os.getloadavg()[0]
        rates = measure(dtype, args)
        print(
            f"{dtype}, {args.numel:,} elements, {args.threads} threads, {bytes_of(dtype)} bytes an element, "
            f"load average {load:.2f}"
        )
        for name, values in rates.items():
            ratio, pairs = (
                median(values) / median(rates["ours"]),
                median(b / a for a, b in zip(rates["ours"], values, strict=True)),
            )
            row = f"  {name:<10}{median(values):7.1f} GB/s ({min(values):.1f} to {max(values):.1f})"
            print(row if name == "ours" else f"{row}   time of ours / it: {ratio:.2f}, median of rounds {pairs:.2f}")
        print(json.dumps({dtype: {name: [round(v, 2) for v in values] for name, values in rates.items()}}), flush=True)


if __name__ == "__main__":
    main()
