"""Scripts of the clients under this project and under the reference: does the same script end with the same loss?

    <clients' python> benchmarks/clients.py --reference-python <its python> [--clients raw trainer] [--ranks 1 2]
    <clients' python> benchmarks/clients.py --write-docs      the table of all that was run, to benchmarks/same_loss.md

Run it with the interpreter of the clients' environment (tests/compat/README.md); the reference's environment needs the
same clients. Each of the two runs ``peers/client_rank.py``, one process group for as many cells as succeed in it. A row
for each cell is appended to .bench/clients.jsonl, from which the table is made (of equal cells the last counts). Exit
status 1 where a cell is further apart than it may be: 1e-5 of the reference's last loss in fp32, 1e-3 in bf16.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from lora import environment

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "same_loss.md"
ROWS = ROOT / ".bench" / "clients.jsonl"
CLIENTS = {
    "raw": "plain loop, AdamW and WarmupLR of the configuration",
    "trainer": 'Transformers\' Trainer, everything "auto"',
    "accelerate": "Accelerate, torch's AdamW",
    "peft": "PEFT, LoRA in a plain loop",
    "lightning": "Lightning's Trainer, torch's AdamW",
    "sft": "TRL's SFTTrainer",
    "dpo": "TRL's DPOTrainer with a reference model",
}
LIMITS = {"fp32": 1e-5, "bf16": 1e-3}


def group(args: argparse.Namespace, cells: list[str], ranks: int, *, reference: bool) -> set[str]:
    """One process group; the cells that it came to, a row for each to ``ROWS``. The first unfinished is an error."""
    python = args.reference_python.absolute() if reference else Path(sys.executable)
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "benchmarks" / "peers" / "client_rank.py"), *cells]
    command += ["--reference"] if reference else []
    rows: list[dict[str, Any]] = []
    # Not the repository: the current folder is on the path of -m.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors, ROWS.open("a") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(args, reference=reference),
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        late = threading.Timer(args.timeout, os.killpg, (process.pid, signal.SIGKILL))
        late.start()

        def note(row: dict[str, Any]) -> None:
            rows.append(row)
            line = json.dumps({"ranks": ranks, "reference": reference, **row})
            file.write(line + "\n")
            file.flush()
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

        for line in process.stdout or ():
            if "RESULT " in line:
                note(json.loads(line.partition("RESULT ")[2]))
        process.wait()
        late.cancel()
        done = {row["cell"] for row in rows}
        missing = [cell for cell in cells if cell not in done]
        if missing and not any("error" in row for row in rows):
            note({"cell": missing[0], "error": f"no answer, exit status {process.returncode}"})
        if any("error" in row for row in rows):
            errors.seek(0)
            sys.stderr.write(errors.read()[-3000:] + "\n")
    return {row["cell"] for row in rows}


def measure(args: argparse.Namespace, ranks: int, *, reference: bool) -> None:
    """All cells that were asked for, in new process groups after each failure."""
    left = [f"{client}:{stage}:{dtype}" for client in args.clients for stage in args.stages for dtype in args.dtypes]
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    while left:
        done = group(args, left[:1] if args.fresh else left, ranks, reference=reference)
        left = [cell for cell in left if cell not in done]


def cell_text(rows: dict[tuple[str, int, bool], dict[str, Any]], cell: str, ranks: int) -> tuple[str, bool]:
    """What the table says of one cell, and whether it is as it must be."""
    ours, other = rows.get((cell, ranks, False)), rows.get((cell, ranks, True))
    if ours is None or other is None:
        return "not run", True
    if "error" in other:
        return f"the reference fails ({other['error'].split(':')[0]})", True
    if "error" in ours:
        return f"**fails** ({ours['error'].split(':')[0]})", False
    mine, theirs = ours["losses"][-1], other["losses"][-1]
    apart = abs(mine - theirs) / abs(theirs)
    close = len(ours["losses"]) == len(other["losses"]) and apart <= LIMITS[cell.split(":")[2]]
    return f"{mine:.5f} / {theirs:.5f}, {'' if close else '**'}{apart:.1e}{'' if close else '**'}", close


def table() -> tuple[str, int]:
    """The table of the latest row of each cell, and how many cells are not as they must be."""
    rows: dict[tuple[str, int, bool], dict[str, Any]] = {}
    for line in ROWS.read_text().splitlines():
        row = json.loads(line)
        rows[row["cell"], row["ranks"], row["reference"]] = row
    lines, wrong = [], 0
    for client, what in CLIENTS.items():
        heads = [(ranks, dtype) for ranks in (1, 2) for dtype in LIMITS]
        body = []
        for stage in (1, 2, 3):
            texts = [cell_text(rows, f"{client}:{stage}:{dtype}", ranks) for ranks, dtype in heads]
            wrong += sum(not good for _, good in texts)
            body.append(f"| {stage} | " + " | ".join(text for text, _ in texts) + " |")
        columns = " | ".join(f"{dtype}, {ranks} rank{'s' * (ranks > 1)}" for ranks, dtype in heads)
        lines += [f"## {what[0].upper()}{what[1:]}", "", f"| ZeRO | {columns} |", "|---|---|---|---|---|", *body, ""]
    return "\n".join(lines), wrong


def head() -> str:
    """Conditions and versions."""
    names = ("torch", "transformers", "accelerate", "peft", "trl", "lightning")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return (
        "# The same loss\n\n"
        "This page compares the last of ten losses under this project and under DeepSpeed 0.19.8. Read it to see "
        "whether a client trains alike\nunder both.\n\n"
        "A cell has both losses, this project's first, and their relative difference. It may be 1e-5 in fp32 and 1e-3 "
        "in bf16; a larger\ndifference is in bold. The model is a Llama of two layers on text of the standard library, "
        "with two micro-batches a step and clipping\nat 1 (`benchmarks/peers/client_rank.py`). The page is written by "
        "`benchmarks/clients.py --write-docs`.\n\n"
        f"{datetime.datetime.now(tz=datetime.timezone.utc):%Y-%m-%d}, CPU ranks over gloo: {versions}.\n\n"
    )


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python", type=Path, default=ROOT / ".bench" / "reference" / "bin" / "python")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--stages", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--dtypes", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2), default=[2, 1])
    parser.add_argument("--packages", nargs="+", choices=("ours", "reference"), default=["reference", "ours"])
    parser.add_argument("--fresh", action="store_true", help="a process group for each cell")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one process group")
    parser.add_argument("--write-docs", action="store_true", help="run nothing, write benchmarks/same_loss.md")
    args = parser.parse_args()
    if not args.write_docs:
        if not args.reference_python.is_file():
            parser.error(f"no interpreter at {args.reference_python}; benchmarks/README.md says how to make one")
        for ranks in args.ranks:
            for package in args.packages:
                measure(args, ranks, reference=package == "reference")
    text, wrong = table()
    sys.stdout.write(text)
    if args.write_docs:
        PAGE.write_text(head() + text.rstrip("\n") + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
