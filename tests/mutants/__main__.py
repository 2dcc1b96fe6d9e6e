"""``python -m tests.mutants``: plant each fault in a copy of the tree, run those of its tests there that ``make test``
runs, and say whether they noticed.

Exit status 0 when every fault was killed, 1 when one survived or could not be decided, 2 for wrong arguments.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.faults import chosen
from tests.mutants.mutant import ROOT, Mutant

LIMIT_S = 240.0
KILLED, SURVIVED, UNDECIDED = "killed", "SURVIVED", "UNDECIDED"


@dataclass
class Run:
    """The tests of one mutant under way in a copy of the tree, with the fault or (to see that they pass then)
    without.
    """

    mutant: Mutant
    copy: Path
    planted: bool
    process: subprocess.Popen[bytes]
    log: Path
    begun: float


def copy_tree(folder: Path) -> Path:
    """A copy of every file of this repository that git knows or would take, in ``folder``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def begin(mutant: Mutant, copy: Path, *, planted: bool) -> Run:
    """Start the tests of ``mutant`` in ``copy``."""
    source = (ROOT / mutant.file).read_text()
    (copy / mutant.file).write_text(mutant.planted(source) if planted else source)
    log = copy.with_suffix(".log")
    # No byte code: a file that is changed twice within a second at the same length would look unchanged.
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    of_make_test = ("-m", "not exhaustive")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *of_make_test, *mutant.tests]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run(mutant, copy, planted, process, log, time.monotonic())


def stop(run: Run) -> None:
    """End the tests and whatever they started in their session, and take the fault out of the copy."""
    for number, grace_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(grace_s)
    shutil.copy2(ROOT / run.mutant.file, run.copy / run.mutant.file)


def verdict(run: Run, status: int | None) -> tuple[str, str]:
    """What pytest's exit ``status`` (None: over the limit) says of the fault, and the line of its output that tells
    why.
    """
    lines = run.log.read_text(errors="replace").splitlines()
    failed = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    last = (failed or [line for line in lines if line.strip()] or [""])[-1][:160]
    if status is None:
        return UNDECIDED, "over the time limit"
    if not run.planted:
        return ("passes" if status == 0 else UNDECIDED), last
    broken = [line for line in lines if re.match(r"E .*(NameError|AttributeError|ImportError|SyntaxError)\b", line)]
    if status == 1 and broken:
        return UNDECIDED, f"the fault does not fit the code any more: {broken[-1].removeprefix('E').strip()}"[:160]
    # pytest: 1 means that tests failed, everything above that they could not be run
    return {0: SURVIVED, 1: KILLED}.get(status, UNDECIDED), last


def replay(mutants: Sequence[Mutant], *, jobs: int, limit_s: float, check: bool) -> dict[str, str]:
    """Outcome by id. ``check``: first see that the tests pass without the fault; a mutant whose tests do not is
    undecided.
    """
    outcomes: dict[str, str] = {}
    waiting = [(mutant, planted) for mutant in mutants for planted in ((False, True) if check else (True,))]
    running: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        free = [copy_tree(Path(folder, f"tree{index}")) for index in range(min(jobs, len(waiting)))]
        try:
            while waiting or running:
                while waiting and free:
                    mutant, planted = waiting.pop(0)
                    running.append(begin(mutant, free.pop(), planted=planted))
                time.sleep(0.05)
                for run in list(running):
                    status, seconds = run.process.poll(), time.monotonic() - run.begun
                    if status is None and seconds <= limit_s:
                        continue
                    stop(run)
                    running.remove(run)
                    free.append(run.copy)
                    outcome, why = verdict(run, status)
                    print(f"{run.mutant.id:4} {outcome:9} {seconds:6.1f} s  {why}", flush=True)
                    if outcome == UNDECIDED or (run.planted and outcomes.get(run.mutant.id) != UNDECIDED):
                        outcomes[run.mutant.id] = outcome
        finally:
            for run in running:
                stop(run)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", metavar="ID,FILE", default="", help="the mutants of these ids and files instead of all"
    )
    parser.add_argument("--list", action="store_true", help="print the list and run nothing")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="so many at a time, each in a copy of its own (default 1)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"seconds for the tests of one mutant (default {LIMIT_S:g})",
    )
    parser.add_argument(
        "--check", action="store_true", help="run the tests without the fault as well: they must pass then"
    )
    given = parser.parse_args(arguments)
    try:
        mutants = chosen(*filter(None, given.only.split(",")))
    except KeyError as error:
        parser.error(f"no mutant has the id or file {error.args[0]}; --list shows them all")
    if given.jobs < 1 or given.limit <= 0:
        parser.error("--jobs and --limit must be positive")
    if given.list:
        for mutant in mutants:
            print(f"{mutant.id:4} {mutant.file}: {mutant.breaks}\n       {' '.join(mutant.tests)}")
        return 0
    begun = time.monotonic()
    outcomes = replay(mutants, jobs=given.jobs, limit_s=given.limit, check=given.check)
    count = {kind: [i for i, outcome in outcomes.items() if outcome == kind] for kind in (KILLED, SURVIVED, UNDECIDED)}
    left = [f"{kind.lower()}: {', '.join(count[kind])}" for kind in (SURVIVED, UNDECIDED) if count[kind]]
    summary = ", ".join(f"{len(ids)} {kind.lower()}" for kind, ids in count.items())
    print("; ".join([f"{len(mutants)} mutants: {summary} in {time.monotonic() - begun:.0f} s", *left]))
    return 0 if len(count[KILLED]) == len(mutants) else 1


if __name__ == "__main__":
    # A signal unwinds as Ctrl-C does, so that the tests are ended and the copies removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
