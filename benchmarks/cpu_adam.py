"""``ds_bench cpu-adam`` (AdamW on host memory: our kernel, torch's fused one, a loop of the same traffic) beside the reference's kernel.

    python benchmarks/cpu_adam.py [--numel 50000000] [--threads 2] [--reference-python PATH]

GB/s count 28 bytes an element (weights, gradient, two moments in; weights and moments out; fp32). Contenders alternate; medians.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
BYTES = 28


def reference(args: argparse.Namespace) -> None:
    """Child in the reference's environment: one rate per line, each after a line on standard input."""
    import torch

    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.set_num_threads(args.threads)
    param = torch.nn.Parameter(torch.randn(args.numel))
    param.grad = torch.randn(args.numel)
    optimizer = DeepSpeedCPUAdam([param], lr=1e-3, weight_decay=0.01)
    optimizer.step()
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        optimizer.step()
        print(BYTES * args.numel / (time.perf_counter() - begin) / 1e9, flush=True)


def main() -> None:
    """Parse, alternate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--reference-python", type=Path, default=ROOT / ".bench" / "reference" / "bin" / "python")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        reference(args)
        return
    sys.path.insert(0, str(ROOT))
    from deepspeed.bench import cpu_adam

    child = None
    with cpu_adam.contenders(args.numel, args.threads) as (found, _):
        if args.reference_python.exists():
            env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": str(args.threads),
            }
            env["PATH"] = f"{args.reference_python.absolute().parent}{os.pathsep}{env['PATH']}"
            command = [str(args.reference_python), __file__, "--child", "--numel", str(args.numel), "--threads", str(args.threads)]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd="/")
            assert child.stdin is not None and child.stdout is not None
            line = child.stdout.readline()
            while line and line.strip() != "ready":
                line = child.stdout.readline()

            def ask() -> float:
                child.stdin.write("\n")
                child.stdin.flush()
                return float(child.stdout.readline())

            if line:
                found["reference"] = ask
        rates = cpu_adam.measure(found, args.rounds)
    if child is not None:
        child.stdin.close()
        child.wait(timeout=60)
    ours = median(rates[cpu_adam.OURS])
    for name, values in rates.items():
        print(f"{name:<18}{median(values):8.1f} GB/s   ours / it {ours / median(values):.2f}   ({min(values):.1f} to {max(values):.1f})")
    print(json.dumps({name: [round(v, 2) for v in values] for name, values in rates.items()}))


if __name__ == "__main__":
    main()
