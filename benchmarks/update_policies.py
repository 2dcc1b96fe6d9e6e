"""Timelines of one step of ZeRO-Offload on the simulated device, a picture in text for each policy of the update.

    PYTHONPATH=. python benchmarks/update_policies.py                  # prints the pictures of docs/offload.md; minutes
    PYTHONPATH=. python benchmarks/update_policies.py travel 1B:2:1     # some policies, and MODEL:STAGE:RANKS

Model and machine are those of ``benchmarks/offload.py``. Each row is a stream, each character the same piece of the
step: ``#`` it is busy for most of that, ``+`` for some, ``.`` hardly. Streams of the simulator do not slow each other,
so what the copies take of the host's memory is not in the times.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks import offload
from deepspeed.tools.simulate.events import COMPUTE, HOST
from deepspeed.tools.simulate.timeline import Interval

WIDTH = 72
POLICIES: dict[str, dict[str, Any]] = {
    "host": {},
    "early": {"super_offload": True},
    "rest": {"ratio": 0.5},
    "travel": {"device_states": "travel"},
    "delayed": {"delayed_update": True},
    "zenflow": {},
}
ZENFLOW = {"topk_ratio": 0.1, "update_interval": 4, "overlap_step": True}
UPDATES = {"cpu_adam": "update on the host", "fused_adam": "update on the device"}


def row_of(interval: Interval) -> str:
    """The row of a piece of work."""
    if interval.name in UPDATES:
        return UPDATES[interval.name]
    if interval.stream == HOST:
        return "program"
    if interval.stream == COMPUTE and "copy" not in interval.name:
        return "kernels"
    if "to the host" in interval.name:
        return "bus, down"
    return "bus, up" if "to the device" in interval.name else "other streams"


def picture(spans: Sequence[Interval], begin: float, seconds: float, *, width: int = WIDTH) -> list[str]:
    """The rows of a step that begins at ``begin``."""
    busy: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * width)
    each = seconds / width
    for span in spans:
        start = max(0.0, span.start - begin)
        stop = min(seconds, span.start + span.seconds - begin)
        for place in range(int(start / each), min(width, int(stop / each) + 1)):
            overlap = min(stop, (place + 1) * each) - max(start, place * each)
            busy[row_of(span)][place] += max(0.0, overlap) / each
    order = ("kernels", "update on the device", "update on the host", "bus, down", "bus, up", "other streams")
    marks = {row: "".join("#" if share > 0.5 else "+" if share > 0.05 else "." for share in busy[row]) for row in order}
    return [f"{row:<21}|{marks[row]}|" for row in order if set(marks[row]) != {"."}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "words", nargs="*", help=f"policies ({', '.join(POLICIES)}; default: all) and MODEL:STAGE:RANKS"
    )
    words = parser.parse_args().words
    if unknown := [word for word in words if ":" not in word and word not in POLICIES]:
        parser.error(f"no policy is called {unknown[0]}; there are {', '.join(POLICIES)}")
    for row in [word for word in words if ":" in word] or ["1B:3:1"]:
        for name in [word for word in words if ":" not in word] or POLICIES:
            outcome, _, _ = offload.run(
                row, 16, block=POLICIES[name], keep=True, zenflow=ZENFLOW if name == "zenflow" else None
            )
            assert not outcome.unordered, outcome.unordered[0]
            begin, peak = min(span.start for span in outcome.spans), outcome.peak / 2**30
            sys.stdout.write(f"{name}: {1e3 * outcome.seconds:,.0f} ms, at most {peak:.1f} GiB on the device\n")
            sys.stdout.write("\n".join(picture(outcome.spans, begin, outcome.seconds)) + "\n\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
