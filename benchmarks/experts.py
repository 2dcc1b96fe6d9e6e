"""Compare a training step of layers of experts with the reference: the same ``MoE`` layers on four gloo ranks.

    python benchmarks/experts.py --rounds 5

Both packages alternate within a round. Prints the medians of the rounds, and the ratio; see README.md for the
reference's own environment.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
SIZES = {"experts": 8, "ep": 4, "width": 256, "inner": 1024, "layers": 4, "batch": 4, "length": 128, "steps": 13}
CASES = {f"top-{k}, ZeRO-{stage}": {**SIZES, "k": k, "stage": stage} for stage in (1, 2) for k in (1, 2)}


def measure(python: Path, case: dict[str, Any], *, ours: bool) -> dict[str, Any]:
    """Return what the first rank prints. Raises SystemExit with the output of a run that fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    env["PYTHONPATH"] = str(ROOT) if ours else ""
    script = str(ROOT / "benchmarks" / "peers" / "expert_rank.py")
    command = [str(python), "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}", "--master_port=29655", script]
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


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds")
    parser.add_argument(
        "--reference-python", type=Path, default=ROOT / ".bench" / "reference" / "bin" / "python", help="interpreter"
    )
    args = parser.parse_args()
    if not args.reference_python.is_file():
        parser.error(f"no interpreter at {args.reference_python}; benchmarks/README.md says how to make one")
    print("| layers of experts | ours (s) | reference (s) | ratio | processor seconds |\n|---|---|---|---|---|")
    for name, case in CASES.items():
        rounds = [
            (measure(Path(sys.executable), case, ours=True), measure(args.reference_python, case, ours=False))
            for _ in range(args.rounds)
        ]
        mine, theirs = (statistics.median(pair[i]["step_s"] for pair in rounds) for i in (0, 1))
        busy = statistics.median(a["cpu_s"] / b["cpu_s"] for a, b in rounds)
        print(f"| {name} | {mine:.3f} | {theirs:.3f} | {mine / theirs:.2f} | {busy:.2f} |", flush=True)


if __name__ == "__main__":
    main()
