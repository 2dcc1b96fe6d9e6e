"""How far the simulator's times and bytes are from published ones, with constants that have not seen the source.

    PYTHONPATH=. python benchmarks/simulator.py report [--write-docs] [--check]    # seconds: plays what is recorded
    PYTHONPATH=. python benchmarks/simulator.py fit                                # minutes: constants, data/fits.json
    PYTHONPATH=. python benchmarks/simulator.py record [--part 0/2] [--check ID]   # an hour: the real engine, each row
    PYTHONPATH=. python benchmarks/simulator.py here [--rounds 5] [--write-docs]   # this machine's CPU ranks

``data/published_steps.json`` has the measurements with their sources. ``record`` runs the real engine on the simulated
device once for each shape and keeps the events of its last step (``simulator_record.py``); ``report`` plays them on the
machine of each row (``simulator_play.py``), with the constants that ``simulator_fit.py`` has found without the row's
source. ``report --check`` fails where docs/simulator.md or benchmarks/simulator.md shows other tables.
"""

import argparse
import functools
import gc
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import simulator_record as recordings
import torch
from simulator_fit import fit_all, fits
from simulator_here import here
from simulator_play import machine_for, machine_with, played, predicted
from simulator_record import keys_of, name_of, published, rows_of

from deepspeed.tools.simulate.events import Work

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGE, NOTE = DOCS / "simulator.md", HERE / "simulator.md"
GIB = 2**30
WANTED = {"median": 0.12, "ninth": 0.30, "memory": 0.10}


@dataclass(frozen=True)
class Compared:
    """One row beside what the simulator says of it."""

    row: dict[str, Any]
    simulated: dict[str, float]

    def error(self, name: str) -> float:
        """Relative: 0.1 where the prediction is 10 % too long."""
        return self.simulated[name] / self.row[name] - 1


def compared(row: dict[str, Any], given: dict[str, float]) -> Compared:
    simulated = predicted(row, machine_for(row, given), fusion=given["all.fusion"])
    if "memory_gib" in row:
        found = recordings.recording_of(keys_of(row)[0])
        simulated["memory_gib"] = (found.reserved if row["memory_kind"] == "reserved" else found.peak) / GIB
        simulated["memory_gib"] += buffers_gib(row)
    return Compared(row, simulated)


def buffers_gib(row: dict[str, Any]) -> float:
    """What DeepSpeed's documentation says that its ZeRO-3 holds beside (``contiguous_gradients``): a bucket of
    ``reduce_bucket_size`` gradients, 5e8 by default, and where several ranks reduce it what goes out of it.
    """
    if row["origin"] != "offload":
        return 0.0
    ranks = row["gpus"] // row.get("tensor", 1)
    return 2 * 5e8 * (2 if ranks > 1 else 1) / GIB


def _ranks(values: list[float]) -> list[float]:
    """From 0; equal values share the mean of their places."""
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def rank_correlation(left: list[float], right: list[float]) -> float:
    """Spearman's: 1 where both put everything in the same order; nan where one of them is constant."""
    x, y = _ranks(left), _ranks(right)
    middle = (len(x) - 1) / 2
    spread = math.sqrt(sum((a - middle) ** 2 for a in x) * sum((b - middle) ** 2 for b in y))
    return sum((a - middle) * (b - middle) for a, b in zip(x, y, strict=True)) / spread if spread else math.nan


@dataclass(frozen=True)
class Errors:
    """Of one table: medians and so on of relative errors, signed where it says so."""

    count: int
    middle: float
    ninth: float
    worst: float
    lean: float

    @staticmethod
    def of(group: list[Compared], name: str) -> "Errors":
        signed = [c.error(name) for c in group if name in c.row]
        errors = sorted(map(abs, signed))
        return Errors(len(errors), median(errors), errors[math.ceil(0.9 * len(errors)) - 1], errors[-1], median(signed))

    def cells(self) -> list[str]:
        shares = (self.middle, self.ninth, self.worst)
        return [str(self.count), *(f"{share:.1%}" for share in shares), f"{self.lean:+.1%}"]


def time_of(row: dict[str, Any]) -> str:
    return "layer_s" if "layer_s" in row else "seconds"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    title, *lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [title, "|" + "---|" * len(head), *lines]


def steps_table(groups: dict[str, list[Compared]]) -> list[str]:
    """A row for each table, whose source no constant has seen; what misses is in bold."""
    lines = []
    for table, group in groups.items():
        errors, order = Errors.of(group, time_of(group[0].row)), ""
        if len(group) > 3:
            name = time_of(group[0].row)
            order = f"{rank_correlation([c.simulated[name] for c in group], [c.row[name] for c in group]):.2f}"
        misses = errors.middle > WANTED["median"] or errors.ninth > WANTED["ninth"]
        whole = all("memory_gib" in c.row for c in group)
        blocks = "all" if whole else f"{' and '.join(map(str, recordings.DEPTHS))}"
        lines.append([f"**{table}**" if misses else table, *errors.cells(), order or "-", blocks])
    head = ["table", "rows", "median error", "90th percentile", "worst", "median of signed", "rank correlation"]
    return _table([*head, "blocks recorded"], lines)


def parts_table(groups: dict[str, list[Compared]]) -> list[str]:
    """Phases and memory, where they are published."""
    lines = []
    for table, group in groups.items():
        for name, title in (
            ("forward_s", "forward"), ("backward_s", "backward"), ("update_s", "update"), ("memory_gib", "memory")
        ):  # fmt: skip
            if any(name in c.row for c in group):
                errors = Errors.of(group, name)
                misses = name == "memory_gib" and errors.middle > WANTED["memory"]
                title = f"{table}, {title}"
                lines.append([f"**{title}**" if misses else title, *errors.cells()])
    return _table(["part", "rows", "median error", "90th percentile", "worst", "median of signed"], lines)


def places_of(groups: dict[str, list[Compared]]) -> list[tuple[str, list[Compared], Compared, int]]:
    """Of each sweep of layouts, one model on the same devices: the best published one, and its place as predicted."""
    sweeps = defaultdict[str, list[Compared]](list)
    for group in groups.values():
        for c in group:
            if "sweep" in c.row:
                sweeps[f"{c.row['table']}, {c.row['sweep']}"].append(c)
    found = []
    for name, sweep in sweeps.items():
        best = max(sweep, key=lambda c: c.row["rate"])
        order = sorted(sweep, key=lambda c: c.simulated["seconds"] / c.row["tokens"])
        found.append((name, sweep, best, order.index(best) + 1))
    return found


def sweeps_table(groups: dict[str, list[Compared]]) -> list[str]:
    """Which place the prediction gives to the best published layout."""
    lines = [[name, str(len(sweep)), best.row["layout"], str(place)] for name, sweep, best, place in places_of(groups)]
    return _table(["sweep", "layouts", "best as published", "its place as predicted"], lines)


def rates_table() -> list[str]:
    """Collectives and products by themselves: gigabytes and teraflops a second."""
    lines = []
    for row in published()["rates"]:
        machine = machine_with(row["machine"], fits()["without"].get(row["origin"], fits()["all"]))
        if row["table"] == "all-reduce":
            ranks, nbytes = tuple(range(row["gpus"])), 1 << 30
            rate = 2 * (len(ranks) - 1) / len(ranks) * nbytes / machine.collective("all_reduce", nbytes, ranks)
            what, unit = f"all-reduce over {row['gpus'] // 8} nodes", 1e9
        else:
            side = 8192
            work = Work("matmul", 2.0 * side**3, 6 * side * side, "bf16", (side, side, side))
            rate, what, unit = work.flops / machine.seconds(work), f"{row['machine']}: best product", 1e12
        cells = [f"{row['rate'] / unit:.0f}", f"{rate / unit:.0f}", f"{rate / row['rate'] - 1:+.0%}"]
        lines.append([what, *cells])
    return _table(["what", "published", "predicted", "error"], lines)


def ours_table() -> list[str]:
    """Offloaded rows whose program waited for its update, and the same step of this engine."""
    lines = []
    for row in rows_of():
        if row.get("ours"):
            machine = machine_for(row, fits()["all"])
            as_it_was, now = (predicted(row, machine, waits=waits)["seconds"] for waits in (True, False))
            title = f"{row['gpus']} ranks, {row['micro_batch']} sequences each"
            lines.append([title, *(f"{seconds:.1f} s" for seconds in (row["seconds"], as_it_was, now))])
    return _table(
        [
            "7B on A100 40 GB, all sources fitted",
            "published",
            "predicted for that program",
            "predicted for this engine",
        ],
        lines,
    )


@functools.cache
def tables() -> tuple[str, str, dict[str, list[Compared]]]:
    """The table of step times that the page shows, all others, which the note shows, and what they are of."""
    groups = defaultdict[str, list[Compared]](list)
    for row in rows_of():
        groups[row["table"]].append(compared(row, fits()["without"][row["origin"]]))
    left_out = [[str(len(ids)), reason] for reason, ids in published()["left_out"].items()]
    missing = [[origin, text] for origin, text in published()["missing"].items()]
    parts = [
        parts_table(groups), sweeps_table(groups), _table(["source", "what is missing"], missing),
        rates_table(), ours_table(), _table(["rows", "left out because of"], left_out),
    ]  # fmt: skip
    return "\n".join(steps_table(groups)), "\n\n".join("\n".join(part) for part in parts), groups


def report(*, write: bool, check: bool) -> int:
    """Print the tables. ``write``: into both pages too, and the picture; ``check``: 1 where a page shows others."""
    steps, details, groups = tables()
    print(steps, details, sep="\n\n")
    places = ((PAGE, "errors", steps), (NOTE, "details", details))
    if write:
        for path, what, text in places:
            _write(path, what, text)
        _picture(groups)
    wrong = [
        path
        for path, what, text in places
        if f"<!-- {what} -->\n{text}\n<!-- end of {what} -->" not in path.read_text()
    ]
    if check and wrong:
        named = " and ".join(str(path) for path in wrong)
        sys.stderr.write(f"other tables in {named}: run benchmarks/simulator.py report --write-docs\n")
        return 1
    return 0


def _write(path: Path, what: str, text: str) -> None:
    before, begin, rest = path.read_text().partition(f"<!-- {what} -->\n")
    _, end, after = rest.partition(f"<!-- end of {what} -->")
    path.write_text(f"{before}{begin}{text}\n{end}{after}")


def _picture(groups: dict[str, list[Compared]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 6.0), dpi=110)
    ends = [0.4, 400.0]
    axes.fill_between(ends, [e / 1.12 for e in ends], [e * 1.12 for e in ends], color="0.9", label="within 12 %")
    axes.plot(ends, ends, color="0.6", linewidth=0.8)
    for table, group in groups.items():
        points = [(c.row["seconds"], c.simulated["seconds"]) for c in group if "seconds" in c.row]
        if points:
            measured, simulated = zip(*points, strict=True)
            axes.scatter(measured, simulated, s=14, label=table)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("measured step, seconds")
    axes.set_ylabel("simulated step, seconds, the source left out of the fit")
    axes.set_aspect("equal")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCS / "simulator.png")


def _rerecord(identity: str) -> int:
    """Record the row of that id once more; 1 where its step takes 2 % more or less than that of what is kept."""
    (row,) = (row for row in rows_of() if row["id"] == identity)
    worst = 0.0
    for key in keys_of(row):
        machine = machine_for(row, fits()["all"])
        now, kept = (played(row, found, machine).seconds for found in
                     (recordings.simulated(key), recordings.recording_of(key)))  # fmt: skip
        worst = max(worst, abs(now / kept - 1))
        print(f"{name_of(key)}: {now:.4f} s, kept {kept:.4f} s")
    return int(worst > 0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("record")
    command.add_argument("--part", default="0/1", help="the rows of one of so many processes")
    command.add_argument("--check", metavar="ID", help="record one row again, and compare")
    commands.add_parser("fit")
    command = commands.add_parser("report")
    command.add_argument("--write-docs", action="store_true")
    command.add_argument("--check", action="store_true")
    command = commands.add_parser("here")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--write-docs", action="store_true")
    args = parser.parse_args()
    if args.command == "record" and args.check:
        return _rerecord(args.check)
    if args.command == "record":
        mine, parts = map(int, args.part.split("/"))
        for key in list(recordings.keys_in_use().values())[mine::parts]:
            recordings.record(key)
            gc.collect()
        recordings.pack()
    elif args.command == "fit":
        fit_all()
    elif args.command == "here":
        print(text := here(args.rounds))
        if args.write_docs:
            _write(NOTE, "here", text)
    else:
        return report(write=args.write_docs, check=args.check)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
