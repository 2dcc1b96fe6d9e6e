"""How far the simulator's times and bytes are from published ones, and the constants that bring them closest.

    PYTHONPATH=. python benchmarks/simulator.py record [--tables mpt-a100 ...] [--part 0/2]   # minutes; kept in .bench/
    PYTHONPATH=. python benchmarks/simulator.py fit mpt-a100 --machine a100 --constants matmul_share attention_share
    PYTHONPATH=. python benchmarks/simulator.py report [--write-docs]
    PYTHONPATH=. python benchmarks/simulator.py here [--rounds 5] [--write-docs]    # this machine's CPU ranks

``data/published_steps.json`` has the measurements with their sources. ``record`` runs the real engine on the simulated
device once for each shape and keeps the events of its last step; ``fit`` and ``report`` play them on other machines.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import itertools
import json
import lzma
import math
import pickle
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from simulator_here import here
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from deepspeed.simulate import models, run
from deepspeed.simulate.costs import Machine, load_machine, machines
from deepspeed.simulate.events import Event, HostWait, Launch, Phase, Record, Wait
from deepspeed.simulate.install import recording, replaced
from deepspeed.simulate.models import Shape, Subject, decoder_subject
from deepspeed.simulate.record import Recorder
from deepspeed.simulate.timeline import Timeline

HERE = Path(__file__).parent
DATA = HERE / "data"
CACHE = HERE.parent / ".bench/simulator"
# The schedule is known after two micro-batches.
STEPS = {1: 3, 2: 2}
# A model without published memory is recorded at these depths only: what one more block takes is their difference.
DEPTHS = (3, 5)
GIB = 2**30
# Tables with rows that constants are fitted on: every second one, beginning with the first.
FITTED = ("mpt-a100", "mpt-h100", "offload-blocking", "azure")


@dataclass
class Recording:
    """The events of a step: of its first micro-batch and, where it has several, of its last; bytes of the whole run.

    An agreement between the programs, which is no event of the device, stands among them as its number of ranks.
    """

    first: list[Event | int] = field(default_factory=list)
    last: list[Event | int] = field(default_factory=list)
    peak: int = 0
    reserved: int = 0
    states: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)


def rows_of(tables: list[str] | None = None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((DATA / "published_steps.json").read_text())["rows"]
    return [row for row in rows if not tables or row["table"] in tables]


def machine_of(name: str) -> Machine:
    """One of the package, or one that only a published table has."""
    return load_machine(name if name in machines() else str(DATA / f"{name}.json"))


def is_fitted(row: dict[str, Any]) -> bool:
    """Whether the constants have seen this row."""
    return row["table"] in FITTED and [r["id"] for r in rows_of([row["table"]])].index(row["id"]) % 2 == 0


# -- recording ----------------------------------------------------------------------------------------------------

_SHAPE = ("layers", "hidden", "heads", "key_heads", "ffn", "vocab", "gated", "tied")
_RUN = ("sequence", "micro_batch", "recompute", "gpus")


def keys_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What the events depend on, for each depth; a step of many micro-batches is recorded with two."""
    key = {
        **{name: row[name] for name in (*_SHAPE, *_RUN)},
        "accumulation": min(2, row["accumulation"]),
        "optimizer_on_host": row.get("optimizer_on_host", False),
    }
    return [key] if "memory_gib" in row else [key | {"layers": depth} for depth in DEPTHS]


def _path(key: dict[str, Any]) -> Path:
    return CACHE / (hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16] + ".xz")


def _config(key: dict[str, Any]) -> dict[str, Any]:
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if key["optimizer_on_host"] else {}
    return {
        "train_micro_batch_size_per_gpu": key["micro_batch"],
        "gradient_accumulation_steps": key["accumulation"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **offload},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def _subject(key: dict[str, Any]) -> Subject:
    shape = Shape(
        width=key["hidden"], blocks=key["layers"], heads=key["heads"], inner=key["ffn"], vocabulary=key["vocab"],
        positions=key["sequence"], key_heads=key["key_heads"], gated=key["gated"], tied=key["tied"],
    )  # fmt: skip
    recompute = key["recompute"] != "none"
    return decoder_subject(
        "published", shape, samples=key["micro_batch"], sequence=key["sequence"], recompute=recompute
    )


def _selective() -> Any:
    """Recomputation as torchtitan's default has it: attention, every second product and collectives are kept."""
    products = {again: itertools.count() for again in (False, True)}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.name()
        if name.startswith(("aten::mm", "aten::addmm")):
            keep = next(products[context.is_recompute]) % 2 == 0
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if "attention" in name else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def _listening(found: Recording) -> Iterator[None]:
    """Inside, a simulation leaves the events of its last step in ``found``."""
    micros: list[list[Event | int]] = []
    state = {"phase": "step", "open": True}

    def listen(event: Event) -> None:
        if isinstance(event, Phase):
            if event.name == "forward":
                micros.append([])
            state["phase"] = event.name
        if not state["open"] or not micros:
            return
        if isinstance(event, Launch):
            micros[-1].append(event._replace(reads=(), writes=(), site=()))
        elif isinstance(event, (Wait, HostWait)):
            micros[-1].append(event._replace(site=()))
        elif isinstance(event, (Record, Phase)):
            micros[-1].append(event)

    @contextlib.contextmanager
    def recorded(machine: Machine, **options: Any) -> Iterator[Recorder]:
        with recording(machine, **options) as recorder:
            # the order was checked by the tests; without it a recording takes two thirds of the time
            recorder.listeners[:] = [recorder.usage.feed, recorder.timeline.feed, listen]
            timeline, work, restart = recorder.timeline, recorder.timeline.host_work, recorder.timeline.restart

            def host_work(seconds: float, name: str = "") -> None:
                if name == "agreement" and micros:
                    micros[-1].append(options["world"])
                work(seconds, name)

            def forget() -> None:
                micros.clear()
                restart()

            with replaced(timeline, "host_work", host_work), replaced(timeline, "restart", forget):
                yield recorder

    def finish(*args: Any) -> Any:
        state["open"] = False
        found.first, found.last = micros[0], micros[-1] if len(micros) > 1 else []
        return outcome_of(*args)

    outcome_of = run._outcome
    with replaced(run, "recording", recorded), replaced(run, "_outcome", finish):
        yield


def record(key: dict[str, Any]) -> None:
    """Simulates and writes the recording, unless it is there."""
    path = _path(key)
    if path.exists():
        return
    began, found = time.perf_counter(), Recording()
    selective: Any = functools.partial(models.checkpoint, context_fn=_selective)
    checkpoint = selective if key["recompute"] == "selective" else models.checkpoint
    with _listening(found), replaced(models, "checkpoint", checkpoint):
        outcome = run.simulate(
            _subject(key),
            _config(key),
            load_machine("h100"),
            world=key["gpus"],
            sharded_init=True,
            steps=STEPS[key["accumulation"]],
        )
    found.peak, found.reserved, found.states = outcome.peak, outcome.reserved, outcome.states
    found.at_peak = outcome.at_peak
    CACHE.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(lzma.compress(pickle.dumps(vars(found)), preset=1))
    part.rename(path)
    print(f"{time.perf_counter() - began:6.1f} s  {len(found.first) + len(found.last):6} events  {key}", flush=True)


@functools.cache
def recording_of(path: Path) -> Recording:
    if not path.exists():
        raise SystemExit(f"{path} is missing: run benchmarks/simulator.py record")
    return Recording(**pickle.loads(lzma.decompress(path.read_bytes())))


# -- playing ------------------------------------------------------------------------------------------------------


class Quick(Machine):
    """A machine that reckons each kind of work once."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.name, machine.values, machine.on_host)
        seconds = functools.cache(super().seconds)
        object.__setattr__(self, "seconds", seconds)


def _play(timeline: Timeline, events: list[Event | int]) -> float:
    for event in events:
        if isinstance(event, int):
            timeline.host_work(timeline.machine.agreement(event))
        else:
            timeline.feed(event)
    return timeline.end


def predicted(row: dict[str, Any], machine: Machine) -> dict[str, float]:
    """Seconds of the row's step, and of its phases summed over micro-batches."""
    played = [_step(_as_configured(row, recording_of(_path(k))), row["accumulation"], machine) for k in keys_of(row)]
    if len(played) == 1:
        return played[0]
    less, more = played
    share = (row["layers"] - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    return {name: value + share * (more[name] - value) for name, value in less.items()}


def _as_configured(row: dict[str, Any], found: Recording) -> Recording:
    """``offload-blocking``: the gradients of the last micro-batch leave for memory that is not page-locked.

    That is what these rows' backward has beyond that of their asynchronous twins, of which all else is the same: the
    fp32 gradients at 6.9, 6.6 and 4.5 GB/s on 1, 2 and 4 ranks of a node, where page-locked copies reach 24.
    """
    if row["table"] != "offload-blocking":
        return found
    name = "last" if found.last else "first"
    events, phase = list[Event | int](), ""
    for event in getattr(found, name):
        phase = event.name if isinstance(event, Phase) else phase
        flushes = phase == "backward" and isinstance(event, Launch) and event.work.kind == "down"
        events.append(event._replace(work=event.work._replace(pinned=False)) if flushes else event)
    return replace(found, **{name: events})


def _step(found: Recording, count: int, machine: Machine) -> dict[str, float]:
    timeline = Timeline(machine)
    if count == 1:
        _play(timeline, found.first)
        return {"seconds": timeline.end, **_phases(timeline)}
    # all micro-batches but the last are alike: the second of them says what one more takes
    first = _play(timeline, found.first)
    more = (_play(timeline, found.first) - first) * (count - 2) if count > 2 else 0.0
    timeline = Timeline(machine)
    _play(timeline, found.first)
    _play(timeline, found.last)
    phases = {name: value if name == "update_s" else value * count / 2 for name, value in _phases(timeline).items()}
    return {"seconds": timeline.end + more, **phases}


def _phases(timeline: Timeline) -> dict[str, float]:
    total = defaultdict[str, float](float)
    for (name, start), (_, stop) in zip(timeline.phases, [*timeline.phases[1:], ("", timeline.end)], strict=True):
        total[name] += stop - start
    return {f"{'update' if name == 'step' else name}_s": value for name, value in total.items()}


# -- fitting ------------------------------------------------------------------------------------------------------


def fit(
    tables: list[str], machine: Machine, constants: list[str], *, phase: str = "seconds", rounds: int = 6
) -> dict[str, float]:
    """The constants that make the squares of log(predicted / measured) least: one after another, with shrinking steps.

    The loss is that of a robust mean: a row that is off by more than 30 % pulls as one that is off by 30 %.
    """
    rows = [row for row in rows_of(tables) if is_fitted(row)]
    values = {name: machine[name] for name in constants}

    def loss(given: dict[str, float]) -> float:
        trial = Machine(machine.name, machine.values | given)
        by_ranks = {ranks: Quick(trial.used_by(ranks)) for ranks in {row["gpus"] for row in rows}}
        errors = [math.log(predicted(row, by_ranks[row["gpus"]])[phase] / row[phase]) for row in rows]
        return sum(_huber(error) for error in errors) / len(rows)

    best, step = loss(values), 0.3
    for _ in range(rounds):
        moved = True
        while moved:
            moved = False
            for name in constants:
                for factor in (1 + step, 1 / (1 + step)):
                    trial = values | {name: values[name] * factor}
                    if (found := loss(trial)) < best * (1 - 1e-4):
                        best, values, moved = found, trial, True
                        break
        print(f"step {step:.3f}: {math.sqrt(best):.4f}  {json.dumps(values)}", flush=True)
        step /= 2
    return values


def _huber(error: float, edge: float = 0.3) -> float:
    return error * error if abs(error) < edge else edge * (2 * abs(error) - edge)


# -- reporting ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One row beside what the simulator says of it."""

    row: dict[str, Any]
    simulated: dict[str, float]

    def error(self, name: str) -> float:
        """Relative: 0.1 where the prediction is 10 % too long."""
        return self.simulated[name] / self.row[name] - 1


def _compared(row: dict[str, Any]) -> Compared:
    simulated = predicted(row, Quick(machine_of(row["machine"]).used_by(row["gpus"])))
    if "memory_gib" in row:
        found = recording_of(_path(keys_of(row)[0]))
        simulated["memory_gib"] = (found.reserved if row["memory_kind"] == "reserved" else found.peak) / GIB
    return Compared(row, simulated)


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


def _line(title: str, group: list[Compared], name: str) -> str:
    errors = sorted(abs(c.error(name)) for c in group)
    ninth = errors[math.ceil(0.9 * len(errors)) - 1]
    lean = median(c.error(name) for c in group)
    order = rank_correlation([c.simulated[name] for c in group], [c.row[name] for c in group])
    shown = f"{order:.2f}" if len(group) > 2 and not math.isnan(order) else "-"
    return f"| {title} | {len(group)} | {median(errors):.1%} | {ninth:.1%} | {errors[-1]:.1%} | {lean:+.1%} | {shown} |"


def report(*, write: bool) -> None:
    """Prints the errors; ``write``: into docs/simulator.md too, and the picture beside it."""
    groups = defaultdict[str, list[Compared]](list)
    missing = 0
    for row in rows_of():
        if all(_path(key).exists() for key in keys_of(row)):
            groups[row["table"]].append(_compared(row))
        else:
            missing += 1
    lines = ["| rows | number | median error | 90th percentile | worst | median of signed | rank correlation |"]
    lines.append("|---|---|---|---|---|---|---|")
    for table, group in groups.items():
        rest = [c for c in group if not is_fitted(c.row)]
        if len(rest) < len(group):
            lines.append(_line(f"{table}, fitted", [c for c in group if is_fitted(c.row)], "seconds"))
        if not rest:
            continue
        lines.append(_line(f"**{table}, not fitted**", rest, "seconds"))
        for name, title in (
            ("forward_s", "forward"), ("backward_s", "backward"), ("update_s", "update"), ("memory_gib", "memory")
        ):  # fmt: skip
            if all(name in c.row for c in rest):
                lines.append(_line(f"{table}, {title}", rest, name))
    text = "\n".join(lines)
    print(text)
    print(f"\n{missing} rows are not recorded" if missing else "")
    if write:
        _write(f"`benchmarks/simulator.py report`, {time.strftime('%Y-%m-%d')}:\n\n{text}")
        _picture(groups)


def _write(text: str, what: str = "errors") -> None:
    path = HERE.parent / "docs/simulator.md"
    before, begin, rest = path.read_text().partition(f"<!-- {what} -->\n")
    _, end, after = rest.partition(f"<!-- end of {what} -->")
    path.write_text(f"{before}{begin}{text}\n{end}{after}")


def _picture(groups: dict[str, list[Compared]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 6.0), dpi=110)
    ends = [0.4, 400.0]
    axes.fill_between(ends, [e / 1.15 for e in ends], [e * 1.15 for e in ends], color="0.9", label="within 15 %")
    axes.plot(ends, ends, color="0.6", linewidth=0.8)
    for index, (table, group) in enumerate(groups.items()):
        for fitted in (True, False):
            points = [(c.row["seconds"], c.simulated["seconds"]) for c in group if is_fitted(c.row) is fitted]
            if points:
                measured, simulated = zip(*points, strict=True)
                axes.scatter(
                    measured, simulated, s=18, linewidth=0.8, edgecolors=f"C{index}",
                    facecolors="none" if fitted else f"C{index}", label=f"{table}{' (fitted)' if fitted else ''}",
                )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("measured step, seconds")
    axes.set_ylabel("simulated step, seconds")
    axes.set_aspect("equal")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE.parent / "docs/simulator.png")


# -- the command --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("record")
    command.add_argument("--tables", nargs="+")
    command.add_argument("--part", default="0/1", help="the rows of one of so many processes")
    command = commands.add_parser("fit")
    command.add_argument("tables", nargs="+")
    command.add_argument("--machine", required=True)
    command.add_argument("--constants", nargs="+", required=True)
    command.add_argument("--phase", default="seconds", help="or forward_s, backward_s, update_s")
    command = commands.add_parser("report")
    command.add_argument("--write-docs", action="store_true")
    command = commands.add_parser("here")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--write-docs", action="store_true")
    args = parser.parse_args()
    if args.command == "record":
        mine, parts = map(int, args.part.split("/"))
        keys = {str(_path(key)): key for row in rows_of(args.tables) for key in keys_of(row)}
        for key in list(keys.values())[mine::parts]:
            record(key)
            gc.collect()
    elif args.command == "fit":
        fit(args.tables, machine_of(args.machine), args.constants, phase=args.phase)
    elif args.command == "here":
        print(text := here(args.rounds))
        if args.write_docs:
            _write(text, "here")
    else:
        report(write=args.write_docs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
