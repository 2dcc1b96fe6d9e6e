"""What the recorded step of a published row takes on a machine, and the constants that bring all of them closest."""

import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulator_record import DATA, DEPTHS, Recording, keys_of, recording_of

from deepspeed.tools.simulate.costs import Machine, machines
from deepspeed.tools.simulate.events import COMPUTE, Event, HostWait, Launch, Phase
from deepspeed.tools.simulate.timeline import Timeline

PACKAGE = DATA.parents[1] / "deepspeed/tools/simulate/machines"
# What a kernel of attention reaches that is not the machine's own: the share of the peak and the length at half of it.
FUSION = 0.6  # of the bytes that fused kernels could save, what they do: see simulator_fit.py
OLD_ATTENTION = {"a100": (0.30, 700.0), "h100": (0.16, 700.0)}


# -- machines --------------------------------------------------------------------------------------------------------


@functools.cache
def _document(name: str) -> dict[str, Any]:
    folder = PACKAGE if name in machines() else DATA
    document: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return document


def lineage(name: str) -> list[str]:
    """A machine and what it is like, the last first."""
    like = _document(name).get("like")
    return [*(lineage(like) if like else []), name]


def constants_of(name: str) -> dict[str, float]:
    """Those of its own file."""
    return {constant: float(value) for constant, (value, _) in _document(name)["constants"].items()}


def machine_with(name: str, given: Mapping[str, float]) -> Machine:
    """A machine with some constants changed, each called ``machine.constant`` after the file that has it."""
    values: dict[str, float] = {}
    for kin in lineage(name):
        values |= constants_of(kin)
        own = {key.partition(".")[2]: value for key, value in given.items() if key.partition(".")[0] in (kin, "all")}
        values |= {key: value for key, value in own.items() if key in values}
    return Machine(name, values)


class Quick(Machine):
    """A machine that reckons each kind of work once."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.name, machine.values, machine.on_host)
        object.__setattr__(self, "seconds", functools.cache(super().seconds))


def machine_for(row: dict[str, Any], given: Mapping[str, float]) -> Quick:
    """The machine of a row, with the kernels that the measured program had."""
    machine = machine_with(row["machine"], given)
    values = dict(machine.values)
    if row.get("attention") == "triton":
        chip = next(kin for kin in lineage(row["machine"]) if kin in OLD_ATTENTION)
        share, half = OLD_ATTENTION[chip]
        values |= {"attention_share": given.get(f"{chip}.old_attention", share), "attention_half": half}
    return Quick(replace(machine, values=values).used_by(row["gpus"]))


# -- playing ---------------------------------------------------------------------------------------------------------


def _play(timeline: Timeline, events: Sequence[Event]) -> float:
    for event in events:
        timeline.feed(event)
    return timeline.end


def as_measured(row: dict[str, Any], found: Recording, fusion: float) -> Recording:
    """The events as the measured program had them. Of offloaded rows the gradients leave as fp32, twice the bytes that
    this engine sends, and of ``offload-blocking`` on the compute stream, for memory that is not page-locked, while the
    program waits: that is what these rows' backward has beyond that of their asynchronous twins. ``fused``: small
    operations in a row are one kernel, of "blocks" or of "all", the loss included, which saves ``fusion`` of what they
    could. ``group``: sums over groups of ranks are those of the last micro-batch alone.
    """
    if "fused" in row:
        moved, loss = iter(found.fused), row["fused"] == "all"
        first, last = (_fused(part, moved, fusion, loss=loss) for part in (found.first, found.last))
        found = replace(found, first=first, last=last)
    if "group" in row and found.last:
        apart = row["group"] * row.get("tensor", 1)
        found = replace(found, first=[event for event in found.first if not _sums_over(event, apart)])
    if row["table"].startswith("offload"):
        name = "last" if found.last else "first"
        blocking = row["table"] == "offload-blocking"
        found = replace(found, **{name: list(_flushed(getattr(found, name), blocking=blocking))})
    return found


def _flushed(events: Sequence[Event], *, blocking: bool) -> Iterator[Event]:
    """With gradients that leave as fp32."""
    phase = ""
    for event in events:
        phase = event.name if isinstance(event, Phase) else phase
        if phase != "backward" or not isinstance(event, Launch) or event.work.kind != "down":
            yield event
            continue
        work = event.work._replace(nbytes=2 * event.work.nbytes)
        if blocking:
            yield event._replace(stream=COMPUTE, work=work._replace(pinned=False))
            yield HostWait("blocking copy", COMPUTE)
        else:
            yield event._replace(work=work)


def _sums_over(event: Event, apart: int) -> bool:
    """Whether that is a sum over ranks so far apart."""
    ranks = event.work.ranks if isinstance(event, Launch) and event.name == "all_reduce" else ()
    return len(ranks) > 1 and ranks[1] - ranks[0] == apart


def _fused(events: Sequence[Event], moved: Iterator[int], fusion: float, *, loss: bool) -> list[Event]:
    """With one kernel for all small operations in a row, which moves what the recording says and so much of what it
    could save; without ``loss`` those that have to do with the loss are as they are.
    """
    kept, row = list[Event](), list[tuple[Launch, int]]()

    def close() -> None:
        if not loss and any("nll_loss" in event.name for event, _ in row):
            kept.extend(event for event, _ in row)
        elif row:
            last, least = row[-1]
            nbytes = round(least + (1 - fusion) * (sum(event.work.nbytes for event, _ in row) - least))
            kept.append(last._replace(work=last.work._replace(nbytes=nbytes, flops=0.0)))
        row.clear()

    for event in events:
        nbytes = next(moved) if isinstance(event, Launch) else 0
        if isinstance(event, Launch) and event.stream == COMPUTE and event.work.kind == "kernel":
            row.append((event, nbytes))
            if nbytes < 0:
                continue
            close()
        else:
            if isinstance(event, (Launch, Phase)):
                close()
            kept.append(event)
    close()
    return kept


@functools.lru_cache(maxsize=1000)
def _recording(row: str, key: str, fusion: float) -> Recording:
    return as_measured(json.loads(row), recording_of(json.loads(key)), fusion)


@dataclass(frozen=True)
class Played:
    """Seconds of a step, of its phases summed over micro-batches, and of one micro-batch more."""

    seconds: float
    phases: dict[str, float]
    more: float

    def towards(self, other: "Played", share: float) -> "Played":
        """So much of the way from this to ``other``."""
        phases = {name: value + share * (other.phases[name] - value) for name, value in self.phases.items()}
        one, another = (self.seconds, self.more), (other.seconds, other.more)
        seconds, more = (a + share * (b - a) for a, b in zip(one, another, strict=True))
        return Played(seconds, phases, more)


def _step(found: Recording, count: int, machine: Machine) -> Played:
    timeline = Timeline(machine)
    first = _play(timeline, found.first)
    if not found.last:
        return Played(timeline.end, _phases(timeline), first)
    # all micro-batches but the last are alike: the second of them says what one more takes
    more = _play(timeline, found.first) - first
    timeline = Timeline(machine)
    _play(timeline, found.first)
    _play(timeline, found.last)
    phases = {name: value if name == "update_s" else value * count / 2 for name, value in _phases(timeline).items()}
    return Played(timeline.end + more * (count - 2), phases, more)


def _phases(timeline: Timeline) -> dict[str, float]:
    total = defaultdict[str, float](float)
    for (name, start), (_, stop) in zip(timeline.phases, [*timeline.phases[1:], ("", timeline.end)], strict=True):
        total[name] += stop - start
    return {f"{'update' if name == 'step' else name}_s": value for name, value in total.items()}


def played(row: dict[str, Any], found: Recording, machine: Machine) -> Played:
    """A recording as the measured program had it, on a machine."""
    return _step(as_measured(row, found, FUSION), row["accumulation"], machine)


def predicted(
    row: dict[str, Any], machine: Machine, *, waits: bool = True, fusion: float | None = None
) -> dict[str, float]:
    """Seconds of the row's step, of its phases, and of a block more.

    Of a pipeline every stage has the same blocks; the last, with the head, sets the pace. Its ranks wait (p - 1) / v
    times as long as a micro-batch takes in the blocks of a stage, for p stages of v chunks (Narayanan et al. 2021).
    """
    text = json.dumps({name: row[name] for name in ("table", "fused", "group", "tensor") if name in row})
    keys = [json.dumps(key) for key in keys_of(row, waits=waits)]
    events = [_recording(text, key, FUSION if fusion is None else fusion) for key in keys]
    each = [_step(found, row["accumulation"], machine) for found in events]
    if len(each) == 1:
        return {"seconds": each[0].seconds, **each[0].phases}
    less, more = each
    stages = row.get("stages", 1)
    blocks = row["layers"] / stages
    whole = less.towards(more, (blocks - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0]))
    block = less.towards(more, 1 / (DEPTHS[1] - DEPTHS[0]))
    bubble = (stages - 1) / row.get("chunks", 1) * blocks * (block.more - less.more)
    one = sum(block.phases[name] - less.phases[name] for name in ("forward_s", "backward_s"))
    return {"seconds": whole.seconds + bubble, "layer_s": one, **whole.phases}


def log_error(row: dict[str, Any], given: Mapping[str, float]) -> float:
    name = "layer_s" if "layer_s" in row else "seconds"
    seconds = predicted(row, machine_for(row, given), fusion=given.get("all.fusion"))
    return math.log(seconds[name] / row[name])
