"""What the simulated step of a rank, or of a pipeline, took: in words, as facts, and as a picture over time."""

import argparse
from collections.abc import Sequence
from typing import Any

from deepspeed.errors import counted
from deepspeed.monitor.program import columns, size
from deepspeed.profiling.timeline.tracefile import TraceFile
from deepspeed.tools.simulate.costs import MESSAGES, Machine
from deepspeed.tools.simulate.events import COMPUTE, DRIVE_READS, DRIVE_WRITES, HOST
from deepspeed.tools.simulate.pipeline.run import PipelineOutcome
from deepspeed.tools.simulate.run import Outcome

_MOST = 6  # rows of a list that can be long
_HEAD = ("stage", "rank", "bubble", "share", "compute", "exposed", "states", "peak", "reserved")
_NAMES = {HOST: "program", DRIVE_READS: "drive: reads", DRIVE_WRITES: "drive: writes"}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _largest(sums: dict[Any, float]) -> list[tuple[Any, float]]:
    return sorted(sums.items(), key=lambda item: -item[1])


def facts(outcome: Outcome, machine: Machine) -> dict[str, Any]:
    """Return the numbers, for programs: seconds and bytes."""
    return {
        "assumed": {name: machine.values[name] for name in sorted(machine.used & machine.assumed)},
        "plain_attention": outcome.plain_attention,
        "routing": outcome.routing,
        "chosen": outcome.chosen,
        "parameters": outcome.parameters,
        "step_seconds": outcome.seconds,
        "phase_seconds": outcome.phases,
        "exposed_seconds": outcome.exposed_seconds,
        "exposed": [{"launch": n, "for": label, "seconds": s} for (n, label), s in _largest(outcome.exposed)],
        "late_seconds": dict(outcome.late),
        "host_waits": [
            {"what": reason, "where": where, "times": times, "seconds": outcome.waited.get((reason, where), 0.0)}
            for (reason, where), times in outcome.waits.most_common()
        ],
        "agreement": {"messages": outcome.messages, "program_seconds": outcome.agreement_seconds},
        "device_bytes": {"states": outcome.states, "peak": outcome.peak, "reserved": outcome.reserved}
        | {"retries": outcome.retries}
        | {"building": outcome.build_peak, "at_peak": outcome.at_peak},
        "host_bytes": outcome.host,
        "unordered": [str(problem) for problem in outcome.unordered],
    }


def text(outcome: Outcome, machine: Machine, title: str) -> str:
    """Return the report that people read."""
    memory: list[tuple[str, float]] = [("model states at rest", outcome.states), ("peak", outcome.peak)]
    memory += [(f"  of it {name}", nbytes) for name, nbytes in _largest(dict(outcome.at_peak)) if nbytes]
    memory += [("reserved by the allocator", outcome.reserved), ("peak while building", outcome.build_peak)]
    memory += [(f"host memory, {place}", nbytes) for place, nbytes in outcome.host.items()]
    share, agreement = (s / outcome.seconds for s in (outcome.exposed_seconds, outcome.agreement_seconds))
    times = [("step", outcome.seconds), *((f"  {name}", seconds) for name, seconds in outcome.phases.items())]
    times += [("exposed transfers", outcome.exposed_seconds)]
    times += [(f"  {n} {label}".rstrip(), seconds) for (n, label), seconds in _largest(outcome.exposed)[:_MOST]]
    times += [("device without work from the program", sum(outcome.late.values()))]
    times += [(f"  after {name}", seconds) for name, seconds in _largest(outcome.late)[:_MOST] if name]
    times += [("program busy with its own work", outcome.busy.get(HOST, 0.0))]
    lines = [title, "", *columns([(name, size(nbytes)) for name, nbytes in memory]), ""]
    lines += [*columns([(name, _ms(seconds)) for name, seconds in times]), ""]
    lines += [f"exposed transfers are {share:.1%} of the step, agreement of the ranks is at most {agreement:.2%}"]
    lines += [
        f"the ranks agree by message {counted(outcome.messages, 'time')} a step, for {_ms(outcome.agreement_seconds)}"
    ]
    waits = outcome.waits.most_common()
    lines += [outcome.chosen] if outcome.chosen else []
    lines += [f"the program waits for the device {counted(sum(outcome.waits.values()), 'time')} in the step"]
    lines += [
        f"  {times} x {reason}, {_ms(outcome.waited.get((reason, where), 0.0))}: {where}"
        for (reason, where), times in waits[:_MOST]
    ]
    lines += [f"  and {len(waits) - _MOST} other places"] * (len(waits) > _MOST)
    if outcome.retries:
        lines += [
            f"the allocator gives memory back to the device {counted(outcome.retries, 'time')} a step, waiting for it"
        ]
    if fault := _too_large(outcome, machine):
        lines += [f"{fault} of {machine.name}"]
    lines += [f"UNORDERED {problem}" for problem in outcome.unordered]
    return "\n".join([*lines, *_premises([outcome], machine)])


def failures(outcome: Outcome, options: argparse.Namespace, who: str = "") -> list[str]:
    """Return the limits that are passed, a sentence each."""
    share, waits = outcome.exposed_seconds / outcome.seconds, sum(outcome.waits.values())
    texts = [f"{len(outcome.unordered)} accesses are without order"] if outcome.unordered else []
    if options.max_memory is not None and outcome.reserved > options.max_memory:
        texts.append(f"--max-memory: {outcome.reserved:,} bytes of the device are needed, not {options.max_memory:,}")
    if options.max_exposed is not None and share > options.max_exposed:
        texts.append(f"--max-exposed: {share:.1%} of the step are exposed transfers, not {options.max_exposed:.1%}")
    if options.no_sync and waits:
        texts.append(f"--no-sync: the program waits for the device {counted(waits, 'time')} in a step")
    return [who + text for text in texts]


def _too_large(outcome: Outcome, machine: Machine) -> str:
    over, room = outcome.reserved - int(machine["device_bytes"]), size(machine["device_bytes"])
    return f"DOES NOT FIT: {size(over)} more than the {room}" if over > 0 else ""


def transfers(outcome: Outcome) -> dict[str, float]:
    """Return the seconds for which transfers hold a stage up, by kind, but for messages: these waits are the bubble."""
    sums: dict[str, float] = {}
    for (name, _), seconds in outcome.exposed.items():
        if name not in MESSAGES:
            sums[name] = sums.get(name, 0.0) + seconds
    return sums


def pipeline_facts(whole: PipelineOutcome, machine: Machine) -> dict[str, Any]:
    """Return the numbers of a pipeline, for programs: seconds and bytes."""
    rows = [
        {"rank": rank, "bubble_seconds": whole.bubble(place), "transfer_seconds": transfers(outcome)}
        | facts(outcome, machine)
        for place, (rank, outcome) in enumerate(zip(whole.ranks, whole.steps, strict=True))
    ]
    idle = sum(whole.bubble(place) for place in range(len(rows))) / len(rows)
    return {
        "parameters": sum(outcome.parameters for outcome in whole.steps),
        "step_seconds": whole.seconds,
        "batch_seconds": whole.window,
        "bubble": idle / whole.window,
        "stages": rows,
    }


def pipeline_text(whole: PipelineOutcome, machine: Machine, name: str) -> str:
    """Return the report on a pipeline that people read, stage by stage."""
    sums, rows = pipeline_facts(whole, machine), [list(_HEAD)]
    for place, (rank, outcome) in enumerate(zip(whole.ranks, whole.steps, strict=True)):
        idle = whole.bubble(place)
        bubble, compute, delay = map(_ms, (idle, outcome.busy.get(COMPUTE, 0.0), sum(transfers(outcome).values())))
        sizes = [size(nbytes) for nbytes in (outcome.states, outcome.peak, outcome.reserved)]
        rows.append([str(place), str(rank), bubble, f"{idle / whole.window:.1%}", compute, delay, *sizes])
    title = f"{name}, {sums['parameters']:,} parameters on this pipeline's ranks, on {machine.name}"
    lines = [title, "", *columns(rows), ""]
    lines += [f"step {_ms(whole.seconds)}, of it {_ms(whole.window)} for the micro-batches"]
    lines += [f"the bubble is {sums['bubble']:.1%} of that: stages wait for what others send"]
    lines += ["exposed: other transfers that hold the stage up"]
    for place, outcome in enumerate(whole.steps):
        if waits := outcome.waits.most_common(3):
            shown = "; ".join(f"{times} x {reason}: {where.partition(' <-')[0]}" for (reason, where), times in waits)
            lines += [f"stage {place}: the program waits for the device: {shown}"]
        if fault := _too_large(outcome, machine):
            lines += [f"stage {place} {fault}"]
        lines += [f"stage {place}: UNORDERED {problem}" for problem in outcome.unordered]
    return "\n".join([*lines, *_premises(whole.steps, machine)])


def _premises(outcomes: Sequence[Outcome], machine: Machine) -> list[str]:
    """Return the premises of the times, a line each."""
    reasons = sorted({reason for outcome in outcomes for reason in outcome.plain_attention})
    assumed = ", ".join(sorted(machine.used & machine.assumed))
    lines = [f"attention is computed by plain products, and charged so: {reason}" for reason in reasons]
    lines += sorted({f"assumed: {outcome.routing}" for outcome in outcomes if outcome.routing})
    return lines + [f"assumed, not measured: {assumed}"] * bool(assumed)


def constants(document: dict[str, Any]) -> list[str]:
    """Return the lines of a table of a machine's file: constant, value and source."""
    rows = [(name, f"{value:.4g}", source) for name, (value, source) in document["constants"].items()]
    return [str(document["name"]), "", *columns(rows, left=3)]


def write_trace(outcomes: Sequence[Outcome], names: Sequence[str], path: str) -> None:
    """Write a process for each rank, of that name, with a row for each stream. Raises OSError."""
    begin = min((span.start for outcome in outcomes for span in outcome.spans), default=0.0)
    with TraceFile(path) as file:
        for process, (outcome, title) in enumerate(zip(outcomes, names, strict=True)):
            streams = sorted({span.stream for span in outcome.spans})
            rows = [_NAMES.get(stream) or outcome.streams.get(stream, f"stream {stream}") for stream in streams]
            file.process(process, title.rstrip(": "), rows)
            for span in outcome.spans:
                place = process, streams.index(span.stream), span.name, span.label or "program"
                file.span(*place, (span.start - begin) * 1e6, span.seconds * 1e6, {})
