"""Predicted beside measured: what the simulator says of the cases of benchmarks/gpu.py, and what that has measured.

    python benchmarks/gpu_predicted.py simulate [CASE ...]   each case on one H100 and one H200; some minutes
    python benchmarks/gpu_predicted.py report --write-docs   the table, into benchmarks/gpu.md

Predictions go to benchmarks/data/gpu_predicted.json, the figures of a device come from gpu_measured.json beside it,
which `benchmarks/gpu.py --out` writes. What was not simulated or not measured is an empty cell.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_cases as table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "benchmarks" / "gpu.md"
BEGIN, END = "<!-- gpu:begin -->\n", "<!-- gpu:end -->\n"
MACHINES = ("h100", "h200")
# One device with its share of a host: the rates of a machine's file are shares of a rank already.
_HOST = {"gpus_per_node": [1, "one device"], "host_bytes": [128 * 2**30, "the machine that is lent"]}


def machine_file(name: str, folder: str) -> Path:
    """One device of that kind, with its part of the host."""
    path = Path(folder) / f"one-{name}.json"
    path.write_text(json.dumps({"like": name, "name": f"one {name}", "constants": _HOST}))
    return path


def simulate(name: str, machine: str, shape: table.Shape = table.TRAIN) -> dict[str, Any]:
    """What one case is predicted to take, by ds_simulate in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="ds_predict_") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(table.config(table.CASES[name], folder, shape.batch)))
        model = (
            "from gpt import GPT, GPTConfig\nimport torch\n\n"
            f"S = {dataclasses.asdict(shape)!r}\n\n\n"
            "def build():\n"
            "    sizes = GPTConfig(S['vocab'], S['context'], S['width'], S['layers'], max(1, S['width'] // 128))\n"
            "    def batch(*_):\n"
            "        return [torch.zeros(S['batch'], S['context'], dtype=torch.long) for _ in range(2)]\n"
            "    return GPT(sizes), batch, lambda output, _: output\n"
        )
        (Path(folder) / "subject.py").write_text(model)
        command = [sys.executable, "-W", "ignore", "-m", "deepspeed.tools.simulate.cli", "--model", "subject:build"]
        command += ["--config", "config.json", "--gpus", "1", "--device", str(machine_file(machine, folder)), "--json"]
        paths = ":".join(map(str, (folder, ROOT, ROOT / "examples")))
        env = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "DS_LOG_LEVEL": "ERROR"}
        ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"{name} on {machine}: {ended.stderr[-800:]}")
    return row_of(json.loads(ended.stdout), table.CASES[name], shape)


def row_of(facts: dict[str, Any], case: table.Case, shape: table.Shape) -> dict[str, Any]:
    """The figures of ds_simulate that a device has, too."""
    step = facts["step_seconds"]
    return {
        "step_s": round(step, 4),
        "tflops": round(case.accumulation * shape.flops / step / 1e12, 1),
        "peak_device_gib": round(facts["device_bytes"]["peak"] / 2**30, 2),
        # benchmarks/gpu.py has its batches on the device already
        "waits_per_step": sum(w["times"] for w in facts["host_waits"] if "move_to_device" not in w["where"]),
        "exposed_s": round(facts["exposed_seconds"], 4),
    }


def _cell(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    return "" if value is None else str(value)


def _step(row: dict[str, Any]) -> str:
    return _cell(row, "failed") or ("" if row.get("step_s") is None else f"{1e3 * row['step_s']:.0f}")


def markdown(predicted: dict[str, Any], measured: dict[str, Any]) -> str:
    """The table: a row for each case, predictions of both machines and the measured figures of one."""
    shape, device = table.TRAIN, measured.get("machine", {}).get("device", "no device yet")
    date = f" on {measured['date']}" if "date" in measured else ""
    lines = [
        f"GPT of {shape.layers} layers, width {shape.width:,}, vocabulary {shape.vocab:,}; {shape.batch} sequences of "
        f"{shape.context:,} tokens a micro-batch; bf16, AdamW, clipping; one device. Predicted by `ds_simulate` with a "
        f"rank's share of an 8-device host{_when(predicted)}; measured by `benchmarks/gpu.py`: **{device}**{date}.",
        "",
        "| | H100 predicted: ms | TFLOP/s | peak, GiB | waits | H200 predicted: ms | measured: ms | TFLOP/s | "
        "peak, GiB | waits | copies hidden |",
        "|---|" + "---|" * 10,
    ]
    for name, case in table.CASES.items():
        one, two = (predicted.get("machines", {}).get(machine, {}).get(name, {}) for machine in MACHINES)
        real = measured.get("cases", {}).get(name, {})
        keys = ("tflops", "peak_device_gib", "waits_per_step")
        cells = [case.title, _step(one), *(_cell(one, key) for key in keys), _step(two), _step(real)]
        lines.append("| " + " | ".join([*cells, *(_cell(real, k) for k in (*keys, "copies_hidden"))]) + " |")
    return "\n".join(lines) + "\n"


def _when(predicted: dict[str, Any]) -> str:
    return f" ({predicted['date']})" if "date" in predicted else ""


def write_docs(text: str, docs: Path = DOCS) -> None:
    """Put the table between its marks."""
    before, _, rest = docs.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{docs} has no marks {BEGIN.strip()} ... {END.strip()}")
    docs.write_text(before + BEGIN + text + END + after)


def main(argv: list[str] | None = None) -> int:
    """The command; 0, or 2 for cases that there are not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("simulate")
    command.add_argument("cases", nargs="*", help="default: all that can be")
    command.add_argument("--date", default="", help="of the run, for the table")
    command = commands.add_parser("report")
    command.add_argument("--write-docs", action="store_true")
    args = parser.parse_args(argv)
    predicted = table.read(table.PREDICTED)
    if args.command == "simulate":
        possible = [name for name, case in table.CASES.items() if case.simulated]
        if unknown := [name for name in args.cases if name not in possible]:
            sys.stderr.write(f"{', '.join(unknown)}: can be simulated are {', '.join(possible)}\n")
            return 2
        predicted |= {"date": args.date} if args.date else {}
        for name in args.cases or possible:
            for machine in MACHINES:
                row = simulate(name, machine)
                predicted.setdefault("machines", {}).setdefault(machine, {})[name] = row
                sys.stdout.write(f"{name} on {machine}: {json.dumps(row)}\n")
                table.PREDICTED.write_text(json.dumps(predicted, indent=1) + "\n")
        return 0
    text = markdown(predicted, table.read(table.MEASURED))
    sys.stdout.write(text)
    if args.write_docs:
        write_docs(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
