"""Reads the record that a run writes with "observe": {"run": DIR}, also while it goes on: its course as one HTML page
that needs no network, or with --follow in the terminal. ds_report --job DIR shows how fast each rank is.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from deepspeed.errors import UsageError
from deepspeed.monitor.program import CommandLine, guarded, size
from deepspeed.monitor.runfile import RECORDS, Run, read_run
from deepspeed.tools.report.run.live import follow, job_text
from deepspeed.tools.report.run.page import facts, page


def run_command(argv: Sequence[str]) -> int:
    """Run ``ds_report run``; return the exit status."""
    parser = CommandLine(prog="ds_report run", description=__doc__)
    parser.add_argument("folder", metavar="DIR", help="what observe.run names")
    parser.option("--out -o", Path, None, "FILE", "the page (default DIR/report.html)")
    parser.switches(follow="show it in the terminal until it ends")
    options = parser.parse_args(argv)

    def act(run: Run) -> int | str:
        if options.follow:
            return follow(run)
        path = options.out or run.folder / "report.html"
        content = page(run).encode(errors="backslashreplace")  # names of files may hold bytes that are no text
        try:
            path.write_bytes(content)
        except OSError as error:
            raise UsageError(
                f"the page cannot be written: {error}. Name a file in a folder of yours: --out FILE"
            ) from error
        rows = [*facts(run), ("page", f"{path} ({size(len(content))})")]
        return "\n".join(f"{name:<24}{value}" for name, value in rows)

    return guarded("ds_report run", lambda: _shown(options.folder, act))


def job_command(folder: str) -> int:
    """Run ``ds_report --job``; return the exit status."""
    return guarded("ds_report --job", lambda: _shown(folder, job_text))


def _shown(folder: str, show: Callable[[Run], int | str]) -> int | str:
    """Return ``show`` of the record in ``folder``; UsageError where its lines are not from this release."""
    run = read_run(folder)
    try:
        return show(run)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        text = f"{run.folder / RECORDS} has lines that no run of this release writes ({reason}); another program"
        raise UsageError(f"{text} wrote to it, or it is damaged") from error
