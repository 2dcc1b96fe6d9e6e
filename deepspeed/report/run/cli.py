"""Reads the record that a run writes with "observe": {"run": DIR}, also while it goes on: its course as one HTML page
that needs no network, or with --follow in the terminal. ds_report --job DIR shows how fast each rank is.
"""

from collections.abc import Sequence
from pathlib import Path

from deepspeed.observe.program import CommandLine, guarded, size
from deepspeed.observe.runfile import read_run
from deepspeed.report.run.live import follow, job_text
from deepspeed.report.run.page import page


def run_command(argv: Sequence[str]) -> int:
    """``ds_report run``; the exit status."""
    parser = CommandLine(prog="ds_report run", description=__doc__)
    parser.add_argument("folder", metavar="DIR", help="what observe.run names")
    parser.option("--out -o", Path, None, "FILE", "the page (default DIR/report.html)")
    parser.switches(follow="show it in the terminal until it ends")
    options = parser.parse_args(argv)

    def act() -> int | str:
        run = read_run(options.folder)
        if options.follow:
            return follow(run)
        path = options.out or run.folder / "report.html"
        text = page(run)
        path.write_text(text, encoding="utf-8")
        return f"{path} ({size(len(text.encode()))})"

    return guarded("ds_report run", act)


def job_command(folder: str) -> int:
    """``ds_report --job``; the exit status."""
    return guarded("ds_report --job", lambda: job_text(read_run(folder)))
