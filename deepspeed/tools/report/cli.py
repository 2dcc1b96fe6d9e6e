"""``ds_report``: versions, machine, devices, tools and variables; then what is missing or doubtful and why it matters.

Answers within seconds, asks nothing of the network, and exits with 0: whatever it cannot find out is a row
``unknown (reason)``. ``ds_report run DIR`` and ``ds_report --job DIR`` read the record of a run instead, and exit
with 2 where there is none.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from deepspeed.monitor.program import CommandLine, guarded
from deepspeed.tools.report import probes
from deepspeed.tools.report.probes import LAUNCH_TOOLS, OPTIONAL, Row, first_line, installed
from deepspeed.tools.report.run.cli import job_command, run_command

WIDTH = 110
VERDICT = "missing or doubtful"

Probe = Callable[[], Row | list[Row]]
Report = Mapping[str, list[Row]]


def gather(named: Mapping[str, Probe]) -> list[Row]:
    """Return the rows of the ``named`` probes; a probe that fails becomes a row ``unknown (reason)``."""
    rows: list[Row] = []
    for name, probe in named.items():
        try:
            answer = probe()
        except Exception as error:
            answer = Row(name, f"unknown ({first_line(error)})")
        rows += [answer] if isinstance(answer, Row) else answer
    return rows


def _listed(uses: Mapping[str, str], find: Callable[[str], str | None], missing: str) -> list[Row]:
    return [Row(name, f"{find(name) or missing}: {use}") for name, use in uses.items()]


def collect(*, operators: bool = True) -> Report:
    """Return everything that the report says, in order. Never raises."""
    torch, reason = probes.load_torch()
    devices: dict[str, Probe] = {"accelerator": lambda: Row("accelerator", "unknown (torch cannot be imported)")}
    if torch is not None:
        devices = {
            "accelerator": partial(probes.device_rows, torch),
            "NCCL": partial(probes.nccl_row, torch),
            "backends": probes.backends_row,
        }
    sections: dict[str, dict[str, Probe]] = {
        "versions": {
            "deepspeed": probes.package_row,
            "torch": partial(probes.torch_rows, torch, reason),
            "required packages": probes.required_rows,
        },
        "platform": {
            "system": lambda: Row("system", " ".join(platform.platform().split())),
            "CPU": probes.cpu_rows,
            "cores": probes.cores_row,
            "memory": probes.memory_rows,
            "/dev/shm": probes.shm_row,
            "limits": probes.limit_rows,
        },
        "device and communication": devices,
        "launch tools": {"launch tools": partial(_listed, LAUNCH_TOOLS, shutil.which, "not on PATH")},
        "build tools": {
            "C++ compiler": probes.compiler_row,
            "ninja": probes.ninja_row,
            "nvcc": partial(probes.cuda_rows, getattr(getattr(torch, "version", None), "cuda", None)),
        },
        "operators": {"operators": probes.operator_rows},
        "optional packages": {"optional packages": partial(_listed, OPTIONAL, installed, "missing")},
        "environment": {
            "this process": partial(probes.identity_row, os.environ),
            "variables": partial(probes.variable_rows, os.environ),
        },
    }
    return {title: gather(named) for title, named in sections.items() if operators or title != "operators"}


def doubts(report: Report) -> dict[str, str]:
    """Return name -> doubt of the rows that carry a doubt, in order."""
    return {row.name: row.doubt for rows in report.values() for row in rows if row.doubt}


def _wrapped(head: str, text: str) -> list[str]:
    clean = text.encode("ascii", "backslashreplace").decode()
    wrapper = textwrap.TextWrapper(WIDTH, head, " " * len(head), break_long_words=False, break_on_hyphens=False)
    lines = wrapper.wrap(clean)  # paths stay whole, to be copied
    return lines or [head.rstrip()]


def as_text(report: Report, *, verdict: bool = True) -> str:
    """Return the report in lines of 110 columns, or a path: a title and aligned rows per section; last the doubts."""
    column = min(34, max((len(row.name) for rows in report.values() for row in rows), default=0))
    parts = {
        title: [line for row in rows for line in _wrapped(f"{row.name:<{column}}  ", row.value)]
        for title, rows in report.items()
    }
    if verdict:
        wrong = [line for name, doubt in doubts(report).items() for line in _wrapped("  ", f"{name}: {doubt}")]
        parts[VERDICT] = wrong or ["  nothing"]
    return "\n\n".join("\n".join([title, "-" * len(title), *lines]) for title, lines in parts.items()) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ds_report`` or ``dsr``; return 0, and 2 where there is no run to be shown."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"]:
        return run_command(argv[1:])
    usage = "ds_report [options]\n       ds_report run DIR [--out FILE] [--follow]"
    parser = CommandLine(prog="ds_report", usage=usage, description=__doc__)
    parser.option("--job", str, None, "DIR", "how fast each rank of a run is; DIR is what observe.run names")
    parser.switches(
        hide_operator_status="leave the operators out",
        hide_errors_and_warnings=f"leave the part '{VERDICT}' out",
        json="one JSON object instead of a table",
    )
    options = parser.parse_args(argv)
    if options.job is not None:
        return job_command(options.job)
    return guarded("ds_report", lambda: _shown(options))


def _shown(options: argparse.Namespace) -> str:
    report, verdict = collect(operators=not options.hide_operator_status), not options.hide_errors_and_warnings
    if options.json:
        content = {title: {row.name: row.value for row in rows} for title, rows in report.items()}
        return json.dumps(content | ({VERDICT: doubts(report)} if verdict else {}), indent=1)
    return as_text(report, verdict=verdict).removesuffix("\n")


if __name__ == "__main__":
    sys.exit(main())
