"""``ds_report``: versions, machine, devices, tools and variables; then what is missing or doubtful and why it matters.

Answers within seconds, asks nothing of the network, and always exits with 0: whatever it cannot find out is a row
``unknown (reason)``.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial

from deepspeed.report import machine, software
from deepspeed.report.rows import VERDICT, Probe, Report, Row, as_text, doubts, gather


def collect(*, operators: bool = True) -> Report:
    """Everything that is to be said, in order. Never raises."""
    torch, reason = software.load_torch()
    devices: dict[str, Probe] = {"accelerator": lambda: Row("accelerator", "unknown (torch cannot be imported)")}
    if torch is not None:
        devices = {
            "accelerator": partial(machine.device_rows, torch),
            "NCCL": partial(machine.nccl_row, torch),
            "backends": machine.backends_row,
        }
    sections: dict[str, dict[str, Probe]] = {
        "versions": {
            "deepspeed": software.package_row,
            "torch": partial(software.torch_rows, torch, reason),
            "required packages": software.required_rows,
        },
        "platform": {
            "system": machine.system_row,
            "CPU": machine.cpu_rows,
            "cores": machine.cores_row,
            "memory": machine.memory_rows,
            "/dev/shm": machine.shm_row,
            "limits": machine.limit_rows,
        },
        "device and communication": devices,
        "launch tools": {"launch tools": software.launch_rows},
        "build tools": {
            "C++ compiler": software.compiler_row,
            "ninja": software.ninja_row,
            "nvcc": partial(software.cuda_rows, getattr(getattr(torch, "version", None), "cuda", None)),
        },
        "operators": {"operators": software.operator_rows},
        "optional packages": {"optional packages": software.optional_rows},
        "environment": {
            "this process": partial(software.identity_row, os.environ),
            "variables": partial(software.variable_rows, os.environ),
        },
    }
    return {title: gather(probes) for title, probes in sections.items() if operators or title != "operators"}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``ds_report`` and ``dsr``; returns 0."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="ds_report", description=__doc__, formatter_class=kind)
    parser.add_argument("--hide_operator_status", action="store_true", help="leave the operators out")
    hide = f"leave the part '{VERDICT}' out"
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help=hide)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(argv)
    report, verdict = collect(operators=not options.hide_operator_status), not options.hide_errors_and_warnings
    text = as_text(report, verdict=verdict)
    if options.json:
        content = {title: {row.name: row.value for row in rows} for title, rows in report.items()}
        text = json.dumps(content | ({VERDICT: doubts(report)} if verdict else {}), indent=1) + "\n"
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
