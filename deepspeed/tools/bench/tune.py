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

from deepspeed.checkpoint.format.folders import write_atomically
from deepspeed.config.parse import parse_text
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.monitor.program import columns, count_of
from deepspeed.tier.arena import ALIGN
from deepspeed.tools.bench.common import block_of
from deepspeed.tools.bench.io import Load, Target, speed, through_engine

CLOSE = 0.98  # of the best: measured again, either could be ahead
LEAST_BYTES = 16 << 20
_DAY_S = 86400
_IDLE_KEYS = ("single_submit", "sequential_requests", "overlap_events")  # of older sweep files
_READERS = {"block_size": block_of, "queue_depth": count_of, "io_parallel": count_of}

Sweep = dict[str, tuple[int, ...]]  # the values that are tried, each with each; as _READERS
SWEEP: Sweep = {"block_size": (256 << 10, 1 << 20, 8 << 20), "queue_depth": (8, 32, 128), "io_parallel": (1, 2, 4, 8)}


@dataclass
class Trial:
    """Setting of the engine, and the GB/s of every repetition with it, of writes and reads."""

    load: Load
    rates: dict[str, list[float]]

    @property
    def score(self) -> float:
        """Return the harmonic mean of the medians, in GB/s: bytes over the time to move them once each way."""
        return statistics.harmonic_mean([statistics.median(values) for values in self.rates.values()])

    @property
    def block(self) -> dict[str, int | bool]:
        """Return the ``aio`` block of a training configuration that drives the engine so."""
        load = self.load
        sizes = {"block_size": load.block_bytes, "queue_depth": load.queue_depth, "intra_op_parallelism": load.threads}
        return {**sizes, "single_submit": False, "overlap_events": True}


def best_of(trials: Sequence[Trial]) -> Trial:
    """Return, of the trials within 2% of the best, the trial with least memory under way, then least threads."""
    top = max(trial.score for trial in trials)
    good = [trial for trial in trials if trial.score >= CLOSE * top]
    return min(good, key=lambda t: (t.load.block_bytes * t.load.queue_depth, t.load.threads, -t.score))


def read_sweep(path: str) -> Sweep:
    """Read a JSON file with lists under ``block_size``, ``queue_depth`` and ``io_parallel``. Raises UsageError."""
    try:
        tree = parse_text(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError, DeepSpeedConfigError) as error:
        raise UsageError(f"the sweep {path} cannot be read: {error}") from error
    lists = dict(SWEEP)
    for key, values in tree.items():
        if key in _IDLE_KEYS:
            continue
        if key not in _READERS or not isinstance(values, list) or not values:
            raise UsageError(f"the sweep {path} has lists under {', '.join(_READERS)}; {key}: {values!r} is none")
        try:
            lists[key] = tuple(_READERS[key](str(value)) for value in values)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"the sweep {path}: {key}: {error}") from error
    return lists


def affordable(nbytes: int, *, measured_gbps: float, seconds: float, passes: int) -> int:
    """Return as much of ``nbytes``, at least 16 MiB, as lets ``passes`` passes over the file end in half the time."""
    most = int(measured_gbps * 1e9 * seconds / 2 / passes)
    return min(nbytes, max(LEAST_BYTES, most)) // ALIGN * ALIGN


def _repeat(trials: list[Trial], target: Target, until: float) -> None:
    for trial in trials:
        with trial.load.engine() as engine:
            for operation, values in trial.rates.items():
                if values and time.monotonic() > until:
                    return
                values.append(speed(target, engine, trial.load, write=operation == "write"))


def tune(options: argparse.Namespace) -> list[Trial]:
    """Measure all settings for ``--seconds``, ``--loops`` times at least; return trials. Raises as Target, OSError."""
    sweep = read_sweep(options.sweep_config) if options.sweep_config else SWEEP
    operations = [name for name in ("write", "read") if not getattr(options, f"no_{name}")]
    sys.stderr.write(f"ds_nvme_tune: measuring in {options.nvme_dir} for about {options.seconds:.0f} s\n")
    until, loops, folder = time.monotonic() + options.seconds, options.loops, options.nvme_dir
    first = Load()
    with first.engine() as engine, contextlib.closing(Target(folder, min(options.io_size, LEAST_BYTES))) as probe:
        through_engine(probe, engine, first, write=True)
        gbps = min(speed(probe, engine, first, write=operation == "write") for operation in operations)
        threads_matter = not probe.file.direct or engine.backend in ("threads", "python")
    threads = sweep["io_parallel"] if threads_matter else sweep["io_parallel"][:1]
    loads = [Load(*values) for values in itertools.product(sweep["block_size"], sweep["queue_depth"], threads)]
    trials = [Trial(load, {name: [] for name in operations}) for load in loads]
    passes = len(trials) * len(operations) * loops
    size = affordable(options.io_size, measured_gbps=gbps, seconds=options.seconds, passes=passes)
    with contextlib.closing(Target(folder, size)) as target:
        with first.engine() as engine:
            through_engine(target, engine, first, write=True)
        turn = 0
        while turn < loops or time.monotonic() <= until:
            _repeat(trials[:: -1 if turn % 2 else 1], target, until if turn >= loops else float("inf"))
            turn += 1
    return trials


def as_text(facts: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the table, fastest first, and the block."""
    trials, best = options.measured
    settings = ("block_size", "queue_depth", "intra_op_parallelism")
    rows: list[list[str | float]] = [[*settings, *(f"{name} GB/s" for name in best.rates), "times", ""]]
    for trial in sorted(trials, key=lambda trial: -trial.score):
        medians, times = map(statistics.median, trial.rates.values()), str(min(map(len, trial.rates.values())))
        mark = "best" if trial is best else ""
        rows.append([*(str(trial.block[key]) for key in settings), *medians, times, mark])
    return "\n".join([*columns(rows, left=0), "", json.dumps({"aio": facts["aio"]}, indent=2)])


def with_block(text: str, block: dict[str, Any]) -> str:
    """Return the JSON object ``text`` with ``block`` merged into its ``aio``, all else unchanged. Raises ValueError."""
    tree = json.loads(text)
    if not isinstance(tree, dict) or not isinstance(tree.get("aio", {}), dict):
        raise ValueError("it is no JSON object, or its aio is none")
    wanted = {**tree, "aio": {**tree.get("aio", {}), **block}}
    merged = json.dumps(wanted["aio"], ensure_ascii=False)
    if "aio" not in tree:  # in front of the first key, in a line like its own
        margin = re.match(r"\s*\{(\s*)", text)
        assert margin is not None
        return f'{text[: margin.end()]}"aio": {merged}{"," + (margin[1] or " ") if tree else ""}{text[margin.end() :]}'
    for key in re.finditer(r'"aio"\s*:\s*', text):  # other objects may have such a key, and texts such words
        with contextlib.suppress(ValueError):
            end = json.JSONDecoder().raw_decode(text, key.end())[1]
            if json.loads(changed := text[: key.end()] + merged + text[end:]) == wanted:
                return changed
    raise ValueError("its aio cannot be told from other text")


def _replace(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step, and keep its mode and the link to it. Raises OSError."""
    path = path.resolve()
    mode = path.stat().st_mode & 0o7777 if path.exists() else 0o644
    write_atomically(path, text.encode(), mode=mode)
    path.chmod(mode)  # whatever the umask


def _merged_config(path: Path, block: dict[str, Any]) -> str:
    """Return configuration ``path`` with ``block``. UsageError on failure, also for comments, which would be lost."""
    try:
        return with_block(path.read_bytes().decode("utf-8"), block)
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(
            f"--config {path} cannot be changed in place ({error}); put the block there by hand, or use --output"
        ) from error


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Try every setting; write the best into the files that were named. Raises UsageError, and as ``tune``."""
    if options.no_read and options.no_write:
        raise UsageError("--no_read and --no_write leave nothing to measure")
    if not 0 <= options.seconds <= _DAY_S:
        raise UsageError(f"--seconds is 0 to {_DAY_S}, not {options.seconds}")
    if options.config:
        _merged_config(options.config, {})
    for path in filter(None, (options.config, options.output)):
        if not os.access(path.resolve().parent, os.W_OK | os.X_OK):
            raise UsageError(f"{path} cannot be written: {path.resolve().parent} is no folder that you may write")
    trials = tune(options)
    options.measured = trials, (best := best_of(trials))
    if options.config:
        _replace(options.config, _merged_config(options.config, best.block))
    if options.output:
        _replace(options.output, json.dumps({"aio": best.block}, indent=2) + "\n")
    rows = [{**trial.block, **trial.rates} for trial in trials]
    return {"aio": best.block, "unit": "GB/s", "trials": rows}
