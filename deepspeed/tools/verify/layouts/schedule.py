"""The gate that draws the schedule of a pipeline."""

from math import gcd

from deepspeed.pipe.orders import Timed, bubble, most_alive, timeline
from deepspeed.pipe.torch_pipelining import make_order
from deepspeed.tools.verify.driver import Driver

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


def check_schedule(driver: Driver) -> int:
    """Draw the schedule of a pipeline: what each rank does when, how long it waits, and what it keeps.

        ds_verify schedule --schedule 1f1b --stages 4 --micro-batches 8
        ds_verify schedule --schedule interleaved --chunks 2 --costs 1 1 1 --hop 0.1

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
    return 0
