"""What the step of a simulated pipeline took, stage by stage."""

from typing import Any

from deepspeed.monitor.program import columns, size
from deepspeed.tools.simulate import report
from deepspeed.tools.simulate.costs import MESSAGES, Machine
from deepspeed.tools.simulate.events import COMPUTE
from deepspeed.tools.simulate.pipeline.run import PipelineOutcome
from deepspeed.tools.simulate.run import Outcome

_HEAD = ("stage", "rank", "bubble", "share", "compute", "exposed", "states", "peak", "reserved")


def exposed(outcome: Outcome) -> dict[str, float]:
    """Return the seconds for which transfers hold a stage up, by kind, but for messages: these waits are the bubble."""
    sums: dict[str, float] = {}
    for (name, _), seconds in outcome.exposed.items():
        if name not in MESSAGES:
            sums[name] = sums.get(name, 0.0) + seconds
    return sums


def facts(whole: PipelineOutcome, machine: Machine) -> dict[str, Any]:
    """Return the numbers, for programs: seconds and bytes."""
    rows = [
        {"rank": rank, "bubble_seconds": whole.bubble(place), "transfer_seconds": exposed(outcome)}
        | report.facts(outcome, machine)
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


def text(whole: PipelineOutcome, machine: Machine, name: str) -> str:
    """Return the report that people read."""
    sums, rows = facts(whole, machine), [list(_HEAD)]
    for place, (rank, outcome) in enumerate(zip(whole.ranks, whole.steps, strict=True)):
        idle = whole.bubble(place)
        times = [idle, outcome.busy.get(COMPUTE, 0.0), sum(exposed(outcome).values())]
        bubble, compute, delay = (f"{1e3 * seconds:.1f} ms" for seconds in times)
        sizes = [size(nbytes) for nbytes in (outcome.states, outcome.peak, outcome.reserved)]
        rows.append([str(place), str(rank), bubble, f"{idle / whole.window:.1%}", compute, delay, *sizes])
    title = f"{name}, {sums['parameters']:,} parameters on this pipeline's ranks, on {machine.name}"
    lines = [title, "", *columns(rows), ""]
    lines += [f"step {1e3 * whole.seconds:.1f} ms, of it {1e3 * whole.window:.1f} ms for the micro-batches"]
    lines += [f"the bubble is {sums['bubble']:.1%} of that: stages wait for what others send"]
    lines += ["exposed: other transfers that hold the stage up"]
    for place, outcome in enumerate(whole.steps):
        if waits := outcome.waits.most_common(3):
            shown = "; ".join(f"{times} x {reason}: {where.partition(' <-')[0]}" for (reason, where), times in waits)
            lines += [f"stage {place}: the program waits for the device: {shown}"]
        if (over := outcome.reserved - int(machine["device_bytes"])) > 0:
            lines += [f"stage {place} DOES NOT FIT: {size(over)} more than the {size(machine['device_bytes'])}"]
        lines += [f"stage {place}: UNORDERED {problem}" for problem in outcome.unordered]
    return "\n".join([*lines, *report.premises(whole.steps, machine)])
