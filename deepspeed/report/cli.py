"""``ds_report``: versions, machine, devices, tools and variables; then what is missing or doubtful and why it matters.

Answers within seconds, asks nothing of the network, and always exits with 0: whatever it cannot find out is a row
``unknown (reason)``.
"""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Sequence

from deepspeed.report import devices, machine, software, variables
from deepspeed.report.rows import Section, as_json, doubts

WIDTH = 110
VERDICT = "missing or doubtful"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hide_operator_status", action="store_true", help="leave the operators out")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help=f"leave the part '{VERDICT}' out")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


def collect(*, operators: bool = True) -> list[Section]:
    """Everything that is to be said, in order. Never raises."""
    torch, reason = software.load_torch()
    sections = [
        software.versions_section(torch, reason),
        machine.section(),
        devices.section(torch),
        software.launch_section(),
        software.tools_section(torch),
        *([software.operators_section()] if operators else []),
        software.optional_section(),
        variables.section(os.environ),
    ]
    return sections


def _wrapped(head: str, text: str) -> list[str]:
    clean = text.encode("ascii", "backslashreplace").decode()
    lines = textwrap.wrap(clean, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
    return lines or [head.rstrip()]


def as_text(sections: Sequence[Section], *, verdict: bool = True) -> str:
    """The report as lines of at most 110 columns: a title, then aligned rows, per section; last the doubts, where
    wanted.
    """
    column = min(34, max((len(row.name) for section in sections for row in section.rows), default=0))
    lines: list[str] = []
    for section in sections:
        lines += [section.title, "-" * len(section.title)]
        for row in section.rows:
            lines += _wrapped(f"{row.name:<{column}}  ", row.value)
        lines.append("")
    if verdict:
        lines += [VERDICT, "-" * len(VERDICT)]
        for row in doubts(sections):
            lines += _wrapped("  ", f"{row.name}: {row.doubt}")
        lines += [] if doubts(sections) else ["  nothing"]
    return "\n".join(lines).rstrip("\n") + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``ds_report`` and ``dsr``; returns 0."""
    options = _parser().parse_args(argv)
    sections = collect(operators=not options.hide_operator_status)
    verdict = not options.hide_errors_and_warnings
    if options.json:
        content = as_json(sections)
        if verdict:
            content[VERDICT] = {row.name: row.doubt for row in doubts(sections)}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        sys.stdout.write(as_text(sections, verdict=verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
