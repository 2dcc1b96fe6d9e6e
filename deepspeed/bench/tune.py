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
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.bench.common import CommandLine, block_of, count_of, guarded, size_of
from deepspeed.bench.drive import Load, Target, speed, through_engine
from deepspeed.checkpoint.format.folders import write_atomically
from deepspeed.config.parse import parse_text
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.tier.aligned import ALIGN

CLOSE = 0.98  # of the best: measured again, either could be ahead
LEAST_BYTES = 16 << 20
_DAY_S = 86400
_IDLE_KEYS = ("single_submit", "sequential_requests", "overlap_events")  # of older sweep files
_REFUSED = {"--gpu": "buffers are in host memory", "--gds": "there is no GPU direct storage in this package"}


@dataclass
class Trial:
    """One setting, and the GB/s of every repetition with it, of writes and reads."""

    load: Load
    rates: dict[str, list[float]]

    @property
    def score(self) -> float:
        """Harmonic mean of the medians, in GB/s: bytes over the time to move them once each way."""
        return statistics.harmonic_mean([statistics.median(values) for values in self.rates.values()])

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
    lists: dict[str, tuple[int, ...]] = {}
    for key, values in tree.items():
        if key in _IDLE_KEYS:
            continue
        if key not in readers or not isinstance(values, list) or not values:
            raise UsageError(f"the sweep {path} has lists under {', '.join(readers)}; {key}: {values!r} is none")
        try:
            lists[key] = tuple(readers[key](str(value)) for value in values)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"the sweep {path}: {key}: {error}") from error
    return Sweep(**lists)


def affordable(nbytes: int, *, measured_gbps: float, seconds: float, passes: int) -> int:
    """As much of ``nbytes``, at least 16 MiB of it, as lets ``passes`` passes over the file end in half of the time."""
    most = int(measured_gbps * 1e9 * seconds / 2 / passes)
    return min(nbytes, max(LEAST_BYTES, most) // ALIGN * ALIGN)


def _repeat(trials: list[Trial], target: Target, until: float) -> None:
    for trial in trials:
        with trial.load.engine() as engine:
            for operation, values in trial.rates.items():
                if values and time.monotonic() > until:
                    return
                values.append(speed(target, engine, trial.load, write=operation == "write"))


def tune(
    folder: str, sweep: Sweep, *, nbytes: int, seconds: float, operations: tuple[str, ...], loops: int = 1
) -> list[Trial]:
    """Measure all settings of ``sweep`` for ``seconds``, at least ``loops`` times each. Raises as Target; OSError."""
    until = time.monotonic() + seconds
    first = Load()
    with first.engine() as engine, contextlib.closing(Target(folder, min(nbytes, LEAST_BYTES))) as probe:
        through_engine(probe, engine, first, write=True)
        gbps = min(speed(probe, engine, first, write=operation == "write") for operation in operations)
        threads_matter = not probe.file.direct or engine.backend in ("threads", "python")
    trials = [Trial(load, {name: [] for name in operations}) for load in sweep.loads(threads_matter=threads_matter)]
    size = affordable(nbytes, measured_gbps=gbps, seconds=seconds, passes=len(trials) * len(operations) * loops)
    with contextlib.closing(Target(folder, size)) as target:
        with first.engine() as engine:
            through_engine(target, engine, first, write=True)
        turn = 0
        while turn < loops or time.monotonic() <= until:
            _repeat(trials[:: -1 if turn % 2 else 1], target, until if turn >= loops else float("inf"))
            turn += 1
    return trials


def as_text(trials: Sequence[Trial], best: Trial) -> str:
    """The table, fastest first, and the block."""
    names = [f"{name} GB/s" for name in best.rates]
    lines = [f"block_size  queue_depth  intra_op_parallelism  {'  '.join(f'{name:>10}' for name in names)}  times"]
    for trial in sorted(trials, key=lambda each: -each.score):
        load, values = trial.load, trial.rates.values()
        medians = "  ".join(f"{statistics.median(each):>10.3f}" for each in values)
        settings = f"{load.block_bytes:>10}  {load.queue_depth:>11}  {load.threads:>20}"
        lines.append(f"{settings}  {medians}  {min(map(len, values)):>5}{'  best' if trial is best else ''}")
    return "\n".join([*lines, "", json.dumps({"aio": aio_block(best.load)}, indent=2)])


def as_json(trials: Sequence[Trial], best: Trial) -> str:
    """The same for programs."""
    rows = [{**aio_block(each.load), **each.rates} for each in trials]
    return json.dumps({"aio": aio_block(best.load), "unit": "GB/s", "trials": rows}, indent=1)


def _members(text: str) -> dict[str, tuple[int, int]]:
    """Where the value of each key of the JSON object ``text`` begins and ends."""
    decoder, spots = json.JSONDecoder(), {}

    def skip(start: int) -> int:
        return len(text) - len(text[start:].lstrip(" \t\r\n,:"))

    at = skip(text.index("{") + 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        begin = skip(at)
        _, end = decoder.raw_decode(text, begin)
        spots[str(key)] = (begin, end)
        at = skip(end)
    return spots


def with_block(text: str, block: dict[str, Any]) -> str:
    """The JSON object ``text`` with ``block`` merged into its ``aio``, all else as it is. Raises ValueError."""
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


def _replace(path: Path, text: str) -> None:
    """Put ``text`` in the place of ``path`` in one step; its mode and the link to it stay. Raises OSError."""
    path = path.resolve()
    mode = path.stat().st_mode & 0o7777 if path.exists() else 0o644
    write_atomically(path, text.encode(), mode=mode)
    path.chmod(mode)  # whatever the umask


def merged_config(path: Path, block: dict[str, Any]) -> str:
    """Text of the configuration ``path`` with ``block``. Raises UsageError, also for comments, which would be lost."""
    try:
        return with_block(path.read_bytes().decode("utf-8"), block)
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(
            f"--config {path} cannot be changed in place ({error}); put the block there by hand, or use --output"
        ) from error


def _parser() -> CommandLine:
    parser = CommandLine("ds_nvme_tune", __doc__)
    parser.add_argument("--nvme_dir", required=True, metavar="DIR", help="folder on the drive")
    parser.option("--seconds", float, 60.0, "N", "time to spend, about (default 60)")
    parser.option("--sweep_config", str, None, "FILE", "JSON with lists under block_size, queue_depth and io_parallel")
    parser.option("--io_size", size_of, 400 << 20, "BYTES", "size of the file at most (default 400M)")
    parser.option("--loops", count_of, 1, "N", "measure each setting N times, whatever the time (default 1)")
    config = "training configuration (strict JSON) that gets the block; nothing else in it changes"
    parser.option("--config", str, None, "FILE", config)
    parser.option("--output", str, None, "FILE", 'write {"aio": ...} to FILE')
    parser.option("--log_dir", str, None, "DIR", "accepted; no logs are written, --json has everything")
    parser.switches(
        no_read="do not measure reads",
        no_write="do not measure writes",
        json="one JSON object with all measurements instead of a table",
        flush_page_cache="accepted; nothing is measured through the page cache if it can be helped",
        verbose="accepted",
    )
    parser.refuse(_REFUSED)
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


def _run(argv: Sequence[str] | None) -> str:
    options = _parser().parse_args(argv)
    _check_options(options)
    sweep = read_sweep(options.sweep_config) if options.sweep_config else Sweep()
    operations = tuple(name for name in ("write", "read") if not getattr(options, f"no_{name}"))
    sys.stderr.write(f"ds_nvme_tune: measuring in {options.nvme_dir} for about {options.seconds:.0f} s\n")
    extent = {"nbytes": options.io_size, "seconds": options.seconds, "loops": options.loops}
    trials = tune(options.nvme_dir, sweep, operations=operations, **extent)
    best = best_of(trials)
    block = aio_block(best.load)
    if options.config:
        _replace(Path(options.config), merged_config(Path(options.config), block))
    if options.output:
        _replace(Path(options.output), json.dumps({"aio": block}, indent=2) + "\n")
    return as_json(trials, best) if options.json else as_text(trials, best)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``ds_nvme_tune``; returns the exit status."""
    return guarded("ds_nvme_tune", lambda: _run(argv))


if __name__ == "__main__":
    sys.exit(main())
