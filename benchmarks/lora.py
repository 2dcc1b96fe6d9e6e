"""ZeRO-3 fine-tuning of low-rank adapters (PEFT) on a frozen Llama of 134M parameters: this project beside the
reference, the same script, two CPU ranks.

    <clients' python> benchmarks/lora.py --reference-python <its python> [--rounds 3] [--recompute] [--write-docs]

Run it with the interpreter of the clients' environment (tests/compat/README.md); the reference's environment needs
the same transformers and peft. Every turn is a fresh ``torchrun`` of ``peers/lora_rank.py``; the two alternate. Prints
a JSON line for each turn and the table of medians; --write-docs puts it between the ``lora:`` markers of
docs/benchmarks.md. Memory is the larger rank's peak resident memory above the base, which is what the rank holds with
all imports and the process group and no model. Exit status 1 where a turn failed.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from train import machine

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- lora:begin -->", "<!-- lora:end -->"
MEMORY, TIME = 0.7, 0.9
"""Of the reference's, at most."""


def environment(args: argparse.Namespace, *, reference: bool) -> dict[str, str]:
    """Without a PYTHONPATH of the caller; only this project's turn sees this tree."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    if not reference:
        return {**env, "PYTHONPATH": str(ROOT)}
    # Its just-in-time builds look for ninja on the PATH.
    path = f"{args.reference_python.absolute().parent}{os.pathsep}{env['PATH']}"
    return {**env, "DS_ACCELERATOR": "cpu", "PATH": path}


def turn(args: argparse.Namespace, *, reference: bool) -> dict[str, Any] | None:
    """One fresh run; None (with the reason on stderr) where it failed."""
    python = args.reference_python.absolute() if reference else Path(sys.executable)
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    command += [str(ROOT / "benchmarks" / "peers" / "lora_rank.py"), "--model", args.model, "--level", str(args.level)]
    command += ["--dtype", args.dtype, "--steps", str(args.steps), "--warmup", str(args.warmup)]
    command += ["--recompute"] if args.recompute else []
    command += ["--reference"] if reference else []
    with tempfile.TemporaryDirectory() as folder:  # not the repository: the current folder is on the path of -m
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(args, reference=reference),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=args.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            errors += f"\nstopped after {args.timeout} s"
    lines = [line.partition("RESULT ")[2] for line in output.splitlines() if "RESULT " in line]
    if not lines:
        sys.stderr.write(
            f"{'reference' if reference else 'ours'}: exit status {process.returncode}\n{errors[-3000:]}\n"
        )
        return None
    found: dict[str, Any] = json.loads(lines[-1])
    sys.stdout.write(lines[-1] + "\n")
    sys.stdout.flush()
    return found


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of all timed steps of all rounds; memory in MiB above the base."""
    return {
        "step": statistics.median(s for row in rows for s in row["step_s"]),
        "first": min(statistics.median(row["step_s"]) for row in rows),
        "last": max(statistics.median(row["step_s"]) for row in rows),
        "cpu": statistics.median(s for row in rows for s in row["cpu_s"]),
        "run": statistics.median(row["run_s"] for row in rows),
        "above": statistics.median(row["peak_mib"] - row["base_mib"] for row in rows),
        "built": statistics.median(row["built_mib"] - row["base_mib"] for row in rows),
        "base": statistics.median(row["base_mib"] for row in rows),
        "loss": rows[0]["losses"][-1],
    }


def table(ours: list[dict[str, Any]], other: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The comparison in Markdown."""
    found = {"this project": medians(ours), other[0]["framework"]: medians(other)}
    mine, theirs = found.values()
    how = "blocks recomputed, " if args.recompute else ""
    lines = [
        machine(args, args.dtype),
        "",
        f"{ours[0]['frozen']:,} frozen parameters and {ours[0]['trained']:,} in adapters of rank 8, {how}"
        f"ZeRO-{args.level}:",
        "",
        "| | step, s | rounds, s | processor, s | whole run, s | peak above base, MiB | of it built, MiB | base, MiB "
        "| last loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        lines.append(
            f"| {name} | {row['step']:.3f} | {row['first']:.3f} to {row['last']:.3f} | {row['cpu']:.3f} "
            f"| {row['run']:.1f} | {row['above']:,.0f} | {row['built']:,.0f} | {row['base']:,.0f} "
            f"| {row['loss']:.4f} |"
        )
    lines += ["", "| of the reference's | at most | measured | |", "|---|---|---|---|"]
    for what, key, most in (("step time", "step", TIME), ("peak above base", "above", MEMORY)):
        ratio = mine[key] / theirs[key]
        lines.append(f"| {what} | {most} | {ratio:.3f} | {'reached' if ratio <= most else 'missed'} |")
    lines.append(f"| processor time of a step | - | {mine['cpu'] / theirs['cpu']:.3f} | |")
    lines.append(f"| whole run, with building | - | {mine['run'] / theirs['run']:.3f} | |")
    return "\n".join(lines)


def main() -> int:
    """Measure in turns, print, write."""
    args = parse_arguments()
    rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    failed = 0
    for _ in range(args.rounds):
        for reference in rows:
            row = turn(args, reference=reference)
            failed += row is None
            rows[reference] += [row] if row is not None else []
    if not all(rows.values()):
        return 1
    text = table(rows[False], rows[True], args)
    sys.stdout.write(text + "\n")
    if args.write_docs:
        page = DOCS.read_text()
        if BEGIN not in page or END not in page:
            raise ValueError(f"{DOCS} has no {BEGIN} ... {END} section to write to")
        DOCS.write_text(f"{page.split(BEGIN)[0]}{BEGIN}\n{text}\n{END}{page.split(END)[1]}")
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python", type=Path, default=ROOT / ".bench" / "reference" / "bin" / "python")
    parser.add_argument("--model", choices=("134m", "tiny"), default="134m")
    parser.add_argument("--level", type=int, choices=range(4), default=3, help="ZeRO stage")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--recompute", action="store_true", help="recompute each block in the backward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of a turn")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one turn")
    parser.add_argument("--write-docs", action="store_true")
    args = parser.parse_args()
    if not args.reference_python.is_file():
        parser.error(f"no interpreter at {args.reference_python}; benchmarks/README.md says how to make one")
    if min(args.rounds, args.steps, args.ranks) < 1:
        parser.error("--rounds, --steps and --ranks must be at least 1")
    args.load, args.threads = os.getloadavg()[0], 1  # the ranks set it themselves
    return args


if __name__ == "__main__":
    sys.exit(main())
