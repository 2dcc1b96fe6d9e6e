"""From the reports of all ranks to the sentences that say why the job stands still; pure."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.comm.hang.stacks import COLLECTIVE, DRIVE, LOADER

RAISED, SILENT, LEFT, RUNS = "raised", "silent", "left", "runs"
# Who is named first: the likelier cause.
_ORDER = (RAISED, SILENT, DRIVE, LOADER, LEFT, RUNS, COLLECTIVE)
_NAMED = 8  # ranks that a line lists one by one
_CALLS = 3
_LINES = 40
# Calls of the user that all ranks make together.
CALLS_OF_ALL = {"save_checkpoint", "load_checkpoint", "save_16bit_model", "save_pretrained", "initialize", "destroy"}
CALLS_OF_ALL |= {"stream_weights", "load_module_state_dict", "wait_for_checkpoint", "train_batch", "eval_batch"}


@dataclass(frozen=True)
class RankReport:
    """Report of a rank about itself, or of another rank about a silent one.

    ``state``: RAISED, SILENT, LEFT, RUNS, or the kind of its wait. ``numbers``: collectives issued on each process
    group, by torch's name of the group. ``call``: this package's function that the user's line calls. ``calls``: the
    last collectives, the newest last. ``still_s``: seconds without progress.
    """

    rank: int
    host: str = ""
    pid: int = 0
    state: str = RUNS
    what: str = ""
    unit: str = ""
    module: str = ""
    line: str = ""
    group: str | None = None
    call: str = ""
    step: int | None = None
    still_s: float = 0.0
    error: str = ""
    trace: str = ""
    stack: tuple[str, ...] = ()
    numbers: dict[str, int] = field(default_factory=dict)
    calls: tuple[str, ...] = ()

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "RankReport":
        """Make a report from what JSON has left of one's fields."""
        return cls(**{**values, "stack": tuple(values["stack"]), "calls": tuple(values["calls"])})


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks as ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts[:_NAMED])}{more}"


def _words(report: RankReport, many: bool) -> str:  # noqa: FBT001 - grammar
    """Return the predicate of one line."""
    s = "" if many else "s"
    predicate = {
        RAISED: f"raised {report.error}",
        SILENT: report.what,
        LEFT: f"{'have' if many else 'has'} left: {report.what}",
        RUNS: f"run{s} code outside collectives",
        DRIVE: f"wait{s} for a drive: {report.what}",
        LOADER: f"wait{s} for {report.what}",
        COLLECTIVE: f"wait{s} in {report.what}",
    }[report.state]
    places = [f"for {report.unit}" if report.unit and report.unit not in predicate else ""]
    places.append(f"in {report.module}" if report.module and report.module != report.unit else "")
    where = " ".join(part for part in (predicate, *filter(None, places)) if part)
    line = f" ({report.line})" if report.line else ""
    return f"{where}{line}" + (f", step {report.step}" if report.step is not None else "")


def _behind(report: RankReport, peers: Sequence[RankReport]) -> str:
    """Return a clause about the collectives that another rank waits in and this rank has not issued; else ""."""
    for other in peers:
        if other.state != COLLECTIVE or other.group is None:
            continue
        issued, latest = report.numbers.get(other.group), other.numbers.get(other.group, 0)
        if issued is not None and issued < latest:
            return (
                f"; {latest - issued} behind rank {other.rank} on the group '{other.group}', whose collective {latest} "
                "it has not issued"
            )
    return ""


def _different(reports: Sequence[RankReport]) -> str:
    """Return a sentence if waiting ranks are at different calls, counts or steps; else ""."""
    waiting = [r for r in reports if r.state == COLLECTIVE]
    steps = {r.step for r in waiting} - {None}
    places: dict[tuple[str | None, int | None], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for r in waiting:
        places[r.group, r.numbers.get(r.group or "")][r.what].append(r.rank)
    if len(steps) > 1:
        listed = "; ".join(
            f"{_ranks([r.rank for r in waiting if r.step == step])}: {step}" for step in sorted(steps, key=str)
        )
        return f"the ranks have taken different numbers of steps ({listed})"
    for (group, number), calls in places.items():
        if group is not None and len(calls) > 1:
            listed = "; ".join(f"{_ranks(ranks)}: {call}" for call, ranks in calls.items())
            return (
                f"the ranks issue collectives in different orders: number {number} of the group '{group}' is {listed}"
            )
    if len(waiting) == len(reports) and len({r.group for r in waiting}) > 1:
        return (
            "the ranks wait in different collectives, so each waits for another: they have taken different branches, "
            "or one has more batches than another"
        )
    return ""


def _alone(reports: Sequence[RankReport]) -> Iterator[str]:
    """Yield a sentence for each call of this package that all ranks have to make and only some have made."""
    for call in sorted({r.call for r in reports if r.state == COLLECTIVE} & CALLS_OF_ALL):
        inside = [r.rank for r in reports if r.call == call]
        outside = [r.rank for r in reports if r.call != call and r.state in (COLLECTIVE, LEFT, RUNS)]
        if outside:
            yield f"every rank must call {call}(): {_ranks(inside)} did, {_ranks(outside)} did not"


def explain(reports: Sequence[RankReport], limit_s: float, *, ends: bool = True) -> str:
    """Explain why the job stands still: a sentence, a line for each rank or several alike, the first error last.

    ``ends``: the job ends with it; else it goes on, and the last calls and the stack of the first rank are left out.
    """
    ordered = sorted(reports, key=lambda r: (_ORDER.index(r.state), r.rank))
    alike: dict[tuple[str, str], list[RankReport]] = defaultdict(list)
    for report in ordered:
        lag = _behind(report, [r for r in ordered if r is not report])
        alike[_words(report, many=True), lag].append(report)
    note = "hang_timeout" if ends else "nothing is ended: hang_timeout does that"
    lines = [f"the job stands still: no rank has made progress for {limit_s:g} s ({note})"]
    lines += [f"  {text}" for text in _alone(ordered)]
    if different := _different(ordered):
        lines.append(f"  {different}")
    for (_, lag), group in alike.items():
        first = group[0]
        subject = _ranks([r.rank for r in group])
        process = f" (pid {first.pid} on {first.host})" if len(group) == 1 and first.pid else ""
        lines.append(f"  {subject}{process} {_words(first, len(group) > 1)}{lag}")
    if len(lines) > _LINES:
        lines[_LINES:] = [f"  and {len(lines) - _LINES} more lines of ranks"]
    raised = [r for r in ordered if r.state == RAISED]
    raised.sort(key=lambda r: (r.error.startswith("RankFailedError"), -r.still_s))
    culprit = ordered[0]
    if raised:
        lines.append(f"The error of rank {raised[0].rank}:\n{raised[0].trace.rstrip()}")
    elif ends:
        if culprit.calls:
            lines.append(f"The last collectives of rank {culprit.rank}:")
            lines += [f"  {call}" for call in culprit.calls[-_CALLS:]]
        if culprit.stack:
            lines.append(f"Where rank {culprit.rank} is:\n{''.join(culprit.stack).rstrip()}")
    return "\n".join(lines) + "\n"
