"""The gate that draws the schedule of a pipeline."""

from importlib import import_module
from math import gcd
from pathlib import Path

from deepspeed.pipe.orders import Program, Timed, bubble, most_alive, timeline
from deepspeed.pipe.torch_pipelining import make_order
from deepspeed.tools.verify.driver import Driver, Finding

_COLUMNS, _FINEST = 220, 100


def usual_chunks(schedule: str) -> int:
    """Return the least number of chunks on a stage that ``schedule`` is made for."""
    return 2 if schedule in ("interleaved", "breadth_first", "zbv", "dualpipev") else 1


def picture(spans: list[list[Timed]]) -> list[str]:
    """Draw a line for each rank; time is cut so finely that actions begin and end between columns, if it fits."""
    times = [round(t * _FINEST) for row in spans for span in row for t in span[1:]]
    step = max(gcd(*times), max(times) // _COLUMNS, 1)
    lines = []
    for row in spans:
        line = ["."] * -(-max(times) // step)
        for action, start, end in row:
            first = {"F": "0", "W": "A"}.get(action.op, "a")
            sign = chr(ord(first) + action.micro % (10 if action.op == "F" else 26))
            for column in range(round(start * _FINEST) // step, round(end * _FINEST) // step):
                line[column] = sign
        lines.append("".join(line))
    return lines


def draw(order: Program, spans: list[list[Timed]], path: Path) -> None:
    """Draw the same into a file. Raises Finding where matplotlib is missing."""
    try:
        import_module("matplotlib").use("Agg")
        plot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise Finding(f"--png needs matplotlib, which is not installed: {error}") from None
    colours = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}
    figure, axes = plot.subplots(figsize=(14, 0.6 * order.ranks + 1.2))
    for rank, row in enumerate(spans):
        for action, start, end in row:
            shade = 1.0 - 0.5 * (action.chunk // order.ranks) / max(1, order.chunks // order.ranks)
            axes.barh(rank, end - start, left=start, color=colours[action.op], alpha=shade, edgecolor="white")
            axes.text((start + end) / 2, rank, str(action.micro), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(order.ranks), [f"rank {r}" for r in range(order.ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("time")
    axes.set_title(f"{order.name}: {bubble(spans):.1%} bubble")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plot.close(figure)


def check_schedule(driver: Driver) -> int:
    """Draw the schedule of a pipeline: what each rank does when, how long it waits, and what it keeps.

        ds_verify schedule --schedule 1f1b --stages 4 --micro-batches 8
        ds_verify schedule --schedule interleaved --chunks 2 --costs 1 1 1 --hop 0.1 --png schedule.png

    Columns are time. A digit is the forward of that micro-batch (its last digit), a small letter its backward (a for
    0), or with zero-bubble schedules the gradients of its inputs, a capital letter those of the weights, a dot waiting.
    """
    options = driver.options
    chunks = options.chunks or usual_chunks(options.schedule)
    order = make_order(options.schedule, options.stages, options.micro_batches, chunks_per_rank=chunks)
    f, i, w = (cost / (order.chunks / order.ranks) for cost in options.costs)
    spans = timeline(order, {"F": f, "I": i, "W": w, "B": i + w}, hop=options.hop)
    for rank, row in enumerate(picture(spans)):
        driver.say(f"rank {rank}: {row}")
    total = max(span.end for row in spans for span in row)
    kept = ", ".join(f"{most_alive(program) * order.ranks / order.chunks:g}" for program in order.actions)
    driver.say(f"\n{order.name}: {total:g} units of time, of which ranks wait {bubble(spans):.1%} (the bubble)")
    driver.say(f"activations of whole stages kept at most, by rank: {kept}")
    if options.png is not None:
        draw(order, spans, options.png)
        driver.say(f"drawn in {options.png}")
    return 0
