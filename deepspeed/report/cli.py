"""``ds_report``: versions, machine, devices, tools and variables; then what is missing or doubtful and why it matters.

Answers within seconds, asks nothing of the network, and always exits with 0: whatever it cannot find out is a row
``unknown (reason)``.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from deepspeed.report import devices, environment, machine, software
from deepspeed.report.rows import VERDICT, Section, as_json, as_text

_SWITCHES = {
    "--hide_operator_status": "leave the operators out",
    "--hide_errors_and_warnings": f"leave the part '{VERDICT}' out",
    "--json": "one JSON object instead of a table",
}


def collect(*, operators: bool = True) -> list[Section]:
    """Everything that is to be said, in order. Never raises."""
    torch, reason = software.load_torch()
    return [
        software.versions_section(torch, reason),
        machine.section(),
        devices.section(torch),
        software.launch_section(),
        software.tools_section(torch),
        *([software.operators_section()] if operators else []),
        software.optional_section(),
        environment.section(os.environ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``ds_report`` and ``dsr``; returns 0."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="ds_report", description=__doc__, formatter_class=kind)
    for flag, text in _SWITCHES.items():
        parser.add_argument(flag, action="store_true", help=text)
    options = parser.parse_args(argv)
    sections = collect(operators=not options.hide_operator_status)
    verdict = not options.hide_errors_and_warnings
    if options.json:
        sys.stdout.write(json.dumps(as_json(sections, verdict=verdict), indent=1) + "\n")
    else:
        sys.stdout.write(as_text(sections, verdict=verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
