"""``ds_nvme_tune``: try settings of the IO engine on a folder's drive, and say the ``aio`` block that is best there.

    ds_nvme_tune --nvme_dir /nvme
    ds_nvme_tune --nvme_dir /nvme --seconds 120 --config ds_config.json

All settings are tried in turn, again and again until the time is up, so that a drive that slows down is slow for all of
them. The best is the one that writes and reads the same bytes in the least time, by medians; among those within 2% of
it, the one with the least memory under way. Exit status: 0; 2 when the command line, the folder or the file to be
written is wrong; 130 after Ctrl-C.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.bench.common import count_of
from deepspeed.config.parse import parse_text
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.nvme.bench import Load, Speeds, Target, fill, speed
from deepspeed.nvme.cli import block_of, guarded, refuse, size_of
from deepspeed.tier.aligned import ALIGN

CLOSE = 0.98  # of the best: measured again, either could be ahead
LEAST_BYTES = 16 << 20
_DAY_S = 86400
_IDLE_KEYS = ("single_submit", "sequential_requests", "overlap_events")  # of older sweep files
_REFUSED = {"--gpu": "buffers are in host memory", "--gds": "there is no GPU direct storage in this package"}


@dataclass
class Trial:
    """One setting, and what was measured with it."""

    load: Load
    speeds: dict[str, Speeds] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Harmonic mean of the medians, in GB/s: bytes over the time to move them once each way."""
        return len(self.speeds) / sum(1 / found.median for found in self.speeds.values())

    @property
    def cost(self) -> tuple[int, int]:
        """Memory under way, and threads."""
        return (self.load.block_bytes * self.load.queue_depth, self.load.threads)


def best_of(trials: Sequence[Trial]) -> Trial:
    """The cheapest of those that are as good as the best."""
    top = max(trial.score for trial in trials)
    return min((trial for trial in trials if trial.score >= CLOSE * top), key=lambda trial: (trial.cost, -trial.score))


def aio_block(load: Load) -> dict[str, int | bool]:
    """The block of a training configuration that drives the engine so."""
    return {
        "block_size": load.block_bytes,
        "queue_depth": load.queue_depth,
        "intra_op_parallelism": load.threads,
        "single_submit": False,
        "overlap_events": True,
    }


@dataclass(frozen=True)
class Sweep:
    """The values that are tried, each with each."""

    block_size: tuple[int, ...] = (256 << 10, 1 << 20, 8 << 20)
    queue_depth: tuple[int, ...] = (8, 32, 128)
    io_parallel: tuple[int, ...] = (1, 2, 4, 8)

    def loads(self, *, threads_matter: bool) -> list[Load]:
        """All settings; only the first number of threads where threads have nothing to do."""
        threads = self.io_parallel if threads_matter else self.io_parallel[:1]
        return [Load(*values) for values in itertools.product(self.block_size, self.queue_depth, threads)]


def read_sweep(path: str) -> Sweep:
    """A JSON file with lists under ``block_size``, ``queue_depth`` and ``io_parallel``. Raises UsageError."""
    try:
        tree = parse_text(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError, DeepSpeedConfigError) as error:
        raise UsageError(f"the sweep {path} cannot be read: {error}") from error
    readers = {"block_size": block_of, "queue_depth": count_of, "io_parallel": count_of}
    found: dict[str, tuple[int, ...]] = {}
    for key, values in tree.items():
        if key in _IDLE_KEYS:
            continue
        if key not in readers or not isinstance(values, list) or not values:
            raise UsageError(f"the sweep {path} has lists under {', '.join(readers)}; {key}: {values!r} is none")
        try:
            found[key] = tuple(readers[key](str(value)) for value in values)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"the sweep {path}: {key}: {error}") from error
    return Sweep(**found)


def affordable(nbytes: int, *, measured_gbps: float, seconds: float, passes: int) -> int:
    """As much of ``nbytes`` as lets ``passes`` passes over the file end within half of the time; at least 16 MiB, if
    there is as much.
    """
    most = int(measured_gbps * 1e9 * seconds / 2 / passes)
    return min(nbytes, max(LEAST_BYTES, most) // ALIGN * ALIGN)


def _round(trials: Iterable[Trial], target: Target, *, until: float) -> None:
    for trial in trials:
        with trial.load.engine() as engine:
            for operation, found in trial.speeds.items():
                if found.values and time.monotonic() > until:
                    return
                found.values.append(speed(target, engine, trial.load, write=operation == "write"))


def tune(
    folder: str, sweep: Sweep, *, nbytes: int, seconds: float, operations: tuple[str, ...], loops: int = 1
) -> list[Trial]:
    """Measure all settings of ``sweep`` for ``seconds``, at least ``loops`` times each. Errors as :class:`Target`, and
    OSError.
    """
    until = time.monotonic() + seconds
    first = Load()
    with first.engine() as engine, contextlib.closing(Target(folder, min(nbytes, LEAST_BYTES))) as probe:
        fill(probe, engine, first)
        gbps = min(speed(probe, engine, first, write=operation == "write") for operation in operations)
        threads_matter = not probe.file.direct or engine.backend in ("threads", "python")
    trials = [
        Trial(load, {operation: Speeds() for operation in operations})
        for load in sweep.loads(threads_matter=threads_matter)
    ]
    size = affordable(nbytes, measured_gbps=gbps, seconds=seconds, passes=len(trials) * len(operations) * loops)
    with contextlib.closing(Target(folder, size)) as target:
        with first.engine() as engine:
            fill(target, engine, first)
        for turn in itertools.count():
            if turn >= loops and time.monotonic() > until:
                return trials
            _round(
                trials if turn % 2 == 0 else reversed(trials), target, until=until if turn >= loops else float("inf")
            )
    raise AssertionError("unreachable")


def as_text(trials: Sequence[Trial], best: Trial) -> str:
    """The table, fastest first, and the block."""
    operations = list(best.speeds)
    lines = [
        "  ".join(
            [
                f"{'block_size':>10}",
                "queue_depth",
                "intra_op_parallelism",
                *(f"{name + ' GB/s':>10}" for name in operations),
                "times",
            ]
        )
    ]
    for trial in sorted(trials, key=lambda each: -each.score):
        load = trial.load
        columns = [f"{load.block_bytes:>10}", f"{load.queue_depth:>11}", f"{load.threads:>20}"]
        columns += [f"{trial.speeds[name].median:>10.3f}" for name in operations]
        columns.append(f"{min(len(found.values) for found in trial.speeds.values()):>5}")
        lines.append("  ".join(columns) + ("  best" if trial is best else ""))
    return "\n".join([*lines, "", json.dumps({"aio": aio_block(best.load)}, indent=2)])


def as_json(trials: Sequence[Trial], best: Trial) -> str:
    """The same for programs."""
    rows = [{**aio_block(each.load), **{name: found.values for name, found in each.speeds.items()}} for each in trials]
    return json.dumps({"aio": aio_block(best.load), "unit": "GB/s", "trials": rows}, indent=1)


def _members(text: str) -> dict[str, tuple[int, int]]:
    """Where the value of each key of the JSON object ``text`` begins and ends."""
    decoder, found = json.JSONDecoder(), {}
    at = text.index("{") + 1
    space = re.compile(r"[\s,:]*")

    def skip(start: int) -> int:
        match = space.match(text, start)
        assert match is not None
        return match.end()

    at = skip(at)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        begin = skip(at)
        _, end = decoder.raw_decode(text, begin)
        found[str(key)] = (begin, end)
        at = skip(end)
    return found


def with_block(text: str, block: dict[str, Any]) -> str:
    """The JSON object ``text`` with ``block`` merged into its ``aio``; every other character stays. Raises ValueError
    for other text.
    """
    tree = json.loads(text)
    if not isinstance(tree, dict) or not isinstance(tree.get("aio", {}), dict):
        raise ValueError("it is no JSON object, or its aio is none")
    margin = re.match(r'\s*\{\s*?\n([ \t]+)"', text)
    indent = margin[1] if margin else None
    newline = "\r\n" if "\r\n" in text else "\n"
    merged = json.dumps({**tree.get("aio", {}), **block}, indent=indent, ensure_ascii=False)
    if indent is not None:
        merged = merged.replace("\n", newline + indent)
    places = _members(text)
    if "aio" in places:
        begin, end = places["aio"]
        return text[:begin] + merged + text[end:]
    at = max((end for _, end in places.values()), default=text.index("{") + 1)
    lead = ("," if places else "") + (newline + indent if indent is not None else " " if places else "")
    return text[:at] + f'{lead}"aio": {merged}' + text[at:]


def write_atomically(path: Path, text: str) -> None:
    """Put ``text`` in the place of ``path`` in one step; its mode and the link that leads to it stay. Raises
    OSError.
    """
    path = path.resolve()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), path.stat().st_mode & 0o7777 if path.exists() else 0o644)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def merged_config(path: Path, block: dict[str, Any]) -> str:
    """Text of the configuration ``path`` with ``block``. Raises UsageError when it is no strict JSON, which would lose
    its comments.
    """
    try:
        return with_block(path.read_bytes().decode("utf-8"), block)
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(
            f"--config {path} cannot be changed in place ({error}); put the block there by hand, or use --output"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_nvme_tune",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nvme_dir", required=True, metavar="DIR", help="folder on the drive")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="time to spend, about (default 60)")
    parser.add_argument(
        "--sweep_config", metavar="FILE", help="JSON with lists under block_size, queue_depth and io_parallel"
    )
    parser.add_argument("--no_read", action="store_true", help="do not measure reads")
    parser.add_argument("--no_write", action="store_true", help="do not measure writes")
    parser.add_argument(
        "--io_size", type=size_of, default=400 << 20, metavar="BYTES", help="size of the file at most (default 400M)"
    )
    parser.add_argument(
        "--loops",
        type=count_of,
        default=1,
        metavar="N",
        help="measure each setting N times, whatever the time (default 1)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="training configuration (strict JSON) that gets the block; nothing else in it changes",
    )
    parser.add_argument("--output", metavar="FILE", help='write {"aio": ...} to FILE')
    parser.add_argument("--json", action="store_true", help="one JSON object with all measurements instead of a table")
    parser.add_argument(
        "--flush_page_cache",
        action="store_true",
        help="accepted; nothing is measured through the page cache if it can be helped",
    )
    parser.add_argument("--log_dir", metavar="DIR", help="accepted; no logs are written, --json has everything")
    parser.add_argument("--verbose", action="store_true", help="accepted")
    refuse(parser, _REFUSED)
    return parser


def _check_options(options: argparse.Namespace) -> None:
    """Whatever would make the measurement useless, before a minute is spent on it. Raises UsageError."""
    if options.no_read and options.no_write:
        raise UsageError("--no_read and --no_write leave nothing to measure")
    if not 0 <= options.seconds <= _DAY_S:
        raise UsageError(f"--seconds is 0 to {_DAY_S}, not {options.seconds}")
    if options.io_size % ALIGN:
        raise UsageError(f"--io_size is a multiple of {ALIGN} bytes, not {options.io_size}; for example 400M")
    if options.config:
        merged_config(Path(options.config), {})
    for name in filter(None, (options.config, options.output)):
        folder = Path(name).resolve().parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{name} cannot be written: {folder} is no folder that you may write")


def _run(options: argparse.Namespace) -> str:
    _check_options(options)
    sweep = read_sweep(options.sweep_config) if options.sweep_config else Sweep()
    operations = tuple(name for name in ("write", "read") if not getattr(options, f"no_{name}"))
    sys.stderr.write(f"ds_nvme_tune: measuring in {options.nvme_dir} for about {options.seconds:.0f} s\n")
    trials = tune(
        options.nvme_dir,
        sweep,
        nbytes=options.io_size,
        seconds=options.seconds,
        operations=operations,
        loops=options.loops,
    )
    best = best_of(trials)
    block = aio_block(best.load)
    if options.config:
        write_atomically(Path(options.config), merged_config(Path(options.config), block))
    if options.output:
        write_atomically(Path(options.output), json.dumps({"aio": block}, indent=2) + "\n")
    return as_json(trials, best) if options.json else as_text(trials, best)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``ds_nvme_tune``; returns the exit status."""
    options = _parser().parse_args(argv)
    return guarded("ds_nvme_tune", lambda: _run(options))


if __name__ == "__main__":
    sys.exit(main())
