"""``ds_io`` and ``ds_bench``: how fast a folder's drive is through the IO engine, beside a plain loop of reads or
writes.

    ds_io --folder /nvme
    ds_io --folder /nvme --read --io_size 4G --queue_depth 64 --json

One file is written to the folder, and gone when the command ends, however it ends. Speeds are in GB/s (10^9 bytes).
Exit status: 0; 2 when the command line or the folder is wrong, or the drive fails; 130 after Ctrl-C.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.bench.common import count_of, spread
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.nvme.bench import WAYS, Load, Plan, Results, Target, compare
from deepspeed.tier.aligned import ALIGN

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

# flags of the command that this one stands in for
_REFUSED = {
    "--folder_to_device_mapping": "give one --folder, and start one ds_io per drive",
    "--multi_process": "--queue_depth loads a drive from one process",
    "--gpu": "buffers are in host memory",
    "--use_gds": "there is no GPU direct storage in this package",
    "--fast_io_size": "the engine needs no second buffer",
    "--slow_bounce_buffer": "the engine needs no second buffer",
    "--torch_legacy_save": "torch.save is not measured",
    "--use_accelerator_pin_memory": "buffers are in host memory",
    "--different_file_each_iteration": "every repetition moves one file, which was written before",
}


class _Refuse(argparse.Action):
    """A flag that says why it is not here."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        parser.error(f"{option} is not in this release: {self.metavar}")


def size_of(text: str) -> int:
    """Bytes of ``1048576``, ``64K``, ``1M``, ``2G`` (powers of 1024). Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+)([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write bytes, or a number with K, M, G or T, for example 64M"
        )
    return int(match[1]) * _UNITS[match[2].upper()]


def block_of(text: str) -> int:
    """``size_of``, a multiple of 4096 and 1 GiB at most."""
    size = size_of(text)
    if size % ALIGN or size > 1 << 30:
        raise argparse.ArgumentTypeError(f"a block is a multiple of {ALIGN} bytes, 1G at most, not {text}")
    return size


def refuse(parser: argparse.ArgumentParser, reasons: dict[str, str]) -> None:
    """Give ``parser`` flags that end it with the reason why they are not here."""
    for flag, reason in reasons.items():
        parser.add_argument(flag, action=_Refuse, nargs="*", metavar=reason, help=argparse.SUPPRESS)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", required=True, help="folder on the drive to be measured")
    parser.add_argument(
        "--io_size", type=size_of, default=1 << 30, metavar="BYTES", help="size of the file (default 1G)"
    )
    parser.add_argument("--read", action="store_true", help="only read (default: write and read)")
    parser.add_argument("--write", action="store_true", help="only write")
    parser.add_argument(
        "--block_size", type=block_of, default=1 << 20, metavar="BYTES", help="bytes of one request (default 1M)"
    )
    parser.add_argument("--queue_depth", type=count_of, default=32, metavar="N", help="requests under way (default 32)")
    threads = "threads where the page cache is in the way, or the backend is threads (default 1)"
    parser.add_argument("--io_parallel", "--threads", type=count_of, default=1, metavar="N", help=threads)
    parser.add_argument(
        "--sequential_requests", action="store_true", help="wait after each request: a queue depth of 1"
    )
    parser.add_argument("--single_submit", action="store_true", help="accepted; the engine submits as room comes free")
    parser.add_argument("--engine", choices=("aio_handle",), default="aio_handle", help="there is one")
    parser.add_argument(
        "--backend",
        choices=("auto", "io_uring", "libaio", "threads"),
        default="auto",
        help="how requests reach the kernel",
    )
    parser.add_argument("--loops", type=count_of, default=3, metavar="N", help="repetitions (default 3)")
    parser.add_argument(
        "--warmup_loops", type=int, default=1, metavar="N", help="untimed repetitions before (default 1)"
    )
    parser.add_argument("--include_warmup_time", action="store_true", help="count them")
    parser.add_argument("--validate", action="store_true", help="read everything back, untimed, and compare")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    refuse(parser, _REFUSED)
    return parser


def as_json(results: Results, facts: dict[str, Any]) -> dict[str, Any]:
    """Settings, and per operation and way the median, least and greatest GB/s, all values, and the ratio of the
    medians.
    """
    measured: dict[str, Any] = {}
    for operation, ways in results.items():
        measured[operation] = {way: spread(found.values) for way, found in ways.items()}
        measured[operation]["ratio"] = ways["engine"].median / ways["plain"].median
    return {**facts, "unit": "GB/s", "results": measured}


def as_text(results: Results, facts: dict[str, Any]) -> str:
    """A title and a table."""
    how = "past the page cache" if facts["direct"] else "through the page cache, as this filesystem has no O_DIRECT"
    lines = [
        f"{facts['folder']}: {facts['io_size'] / 1e6:.1f} MB, {how}",
        f"engine: {facts['backend']}, blocks of {facts['block_size'] >> 10} KiB, {facts['queue_depth']} under way, "
        f"threads {facts['io_parallel']}; plain: one thread, one block at a time",
        "",
        f"{'GB/s':<6} {'way':<7} {'median':>8} {'min':>8} {'max':>8} {'of plain':>9}",
    ]
    for operation, ways in results.items():
        for way in WAYS:
            found = ways[way]
            ratio = f"{found.median / ways['plain'].median:.2f}x" if way == "engine" else ""
            row = (
                f"{operation:<6} {way:<7} {found.median:>8.3f} {min(found.values):>8.3f} {max(found.values):>8.3f} "
                f"{ratio:>9}"
            )
            lines.append(row.rstrip())
    return "\n".join(lines)


def _measure(options: argparse.Namespace) -> str:
    depth = 1 if options.sequential_requests else options.queue_depth
    load = Load(block_bytes=options.block_size, queue_depth=depth, threads=options.io_parallel, backend=options.backend)
    chosen = tuple(name for name in ("write", "read") if getattr(options, name)) or ("write", "read")
    if options.warmup_loops < 0:
        raise UsageError(f"--warmup_loops is 0 or more, not {options.warmup_loops}")
    plan = Plan(chosen, options.loops, options.warmup_loops, options.include_warmup_time, options.validate)
    with load.engine() as engine, contextlib.closing(Target(options.folder, options.io_size)) as target:
        facts = {
            "folder": os.path.abspath(options.folder),
            "backend": engine.backend,
            "direct": target.file.direct,
            "io_size": options.io_size,
            "block_size": load.block_bytes,
            "queue_depth": load.queue_depth,
            "io_parallel": load.threads,
            "loops": options.loops,
        }
        results = compare(target, engine, load, plan)
    return json.dumps(as_json(results, facts), indent=1) if options.json else as_text(results, facts)


def guarded(prog: str, action: Callable[[], str]) -> int:
    """Write what ``action`` returns; a failure is a sentence on standard error. The exit status."""
    try:
        sys.stdout.write(action() + "\n")
        sys.stdout.flush()
    except (DeepSpeedError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains while it ends
            return BROKEN_PIPE
        sys.stderr.write(f"{prog}: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted; what was written is gone\n")
        return INTERRUPTED
    return 0


def main(argv: Sequence[str] | None = None, *, prog: str = "ds_io") -> int:
    """Entry point of ``ds_io``; returns the exit status."""
    options = _parser(prog).parse_args(argv)
    return guarded(prog, lambda: _measure(options))


_BENCH_HELP = """ds_bench io         throughput of a folder's drive; the same as ds_io, and as ds_bench nvme
ds_bench ckpt       how long saving a checkpoint holds training, and until it is on the drive
ds_bench cpu-adam   the optimizer in host memory beside torch's, and beside what the memory gives

Each with --help lists its options. Communication is not measured by this command; deepspeed.comm.log_summary() times
the collectives of
a training run.
"""


def bench(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``ds_bench``; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    what = words[0] if words else ""
    if what in ("io", "nvme"):
        return main(words[1:], prog=f"ds_bench {what}")
    if what in ("ckpt", "cpu-adam"):
        name = f"deepspeed.bench.{what.replace('-', '_')}"  # imported only now: it brings the whole package
        return guarded(
            f"ds_bench {what}", lambda: importlib.import_module(name).run(words[1:], prog=f"ds_bench {what}")
        )
    if what in ("-h", "--help"):
        sys.stdout.write(_BENCH_HELP)
        return 0
    said = f"{what!r} is not in this release" if what else "nothing to measure was named"
    sys.stderr.write(f"ds_bench: {said}\n{_BENCH_HELP}")
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
