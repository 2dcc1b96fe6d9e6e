"""Alternating runs of one script by this project and by the reference, each in an environment of its own."""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def measure(python: Path, script: str, case: dict[str, Any], ranks: int, *, ours: bool) -> dict[str, Any]:
    """Return what the first rank of ``peers/<script>`` prints. Raises SystemExit with the output of a failed run."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    env["PYTHONPATH"] = str(ROOT) if ours else ""
    path = str(ROOT / "benchmarks" / "peers" / script)
    command = [str(python), "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_port=29655", path]
    done = subprocess.run(
        [*command, json.dumps(case)], env=env, cwd="/", capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"step_s"')]
    if not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    if (Path(found["package"]).parent.parent == ROOT) is not ours:
        raise SystemExit(f"the wrong package was imported: {found['package']}")
    return found


def compare(what: str, script: str, cases: dict[str, dict[str, Any]], ranks: int, about: str | None) -> None:
    """Run ``cases`` as the command line says, both packages in turn, and print a table of medians over the rounds."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument(
        "--reference-python", type=Path, default=ROOT / ".bench" / "reference" / "bin" / "python", help="interpreter"
    )
    args = parser.parse_args()
    if not args.reference_python.is_file():
        parser.error(f"no interpreter at {args.reference_python}; benchmarks/README.md says how to make one")
    print(f"| {what} | ours (s) | reference (s) | ratio | processor seconds |\n|---|---|---|---|---|")
    for name, case in cases.items():
        if args.only not in name:
            continue
        rounds = [
            (
                measure(Path(sys.executable), script, case, ranks, ours=True),
                measure(args.reference_python, script, case, ranks, ours=False),
            )
            for _ in range(args.rounds)
        ]
        mine, theirs = (statistics.median(pair[i]["step_s"] for pair in rounds) for i in (0, 1))
        busy = statistics.median(a["cpu_s"] / b["cpu_s"] for a, b in rounds)
        print(f"| {name} | {mine:.3f} | {theirs:.3f} | {mine / theirs:.2f} | {busy:.2f} |", flush=True)
