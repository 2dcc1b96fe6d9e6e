"""``ds_io`` and ``ds_bench io``: how fast a folder's drive is through the IO engine, beside a plain loop.

    ds_io --folder /nvme
    ds_io --folder /nvme --read --io_size 4G --queue_depth 64 --json

One file is written to the folder, and gone when the command ends, however it ends. Speeds are in GB/s (10^9 bytes).
Exit status: 0; 2 when the command line or the folder is wrong, or the drive fails; 130 after Ctrl-C.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed.bench.common import CommandLine, block_of, count_of, guarded, size_of, spread
from deepspeed.bench.drive import WAYS, Load, Target, compare
from deepspeed.errors import UsageError

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


def _parser(prog: str) -> CommandLine:
    parser = CommandLine(prog, __doc__)
    parser.add_argument("--folder", required=True, help="folder on the drive to be measured")
    parser.option("--io_size", size_of, 1 << 30, "BYTES", "size of the file (default 1G)")
    parser.option("--block_size", block_of, 1 << 20, "BYTES", "bytes of one request (default 1M)")
    parser.option("--queue_depth", count_of, 32, "N", "requests under way (default 32)")
    threads = "threads where the page cache is in the way, or the backend is threads (default 1)"
    parser.option("--io_parallel --threads", count_of, 1, "N", threads)
    parser.option("--loops", count_of, 3, "N", "repetitions (default 3)")
    parser.option("--warmup_loops", int, 1, "N", "untimed repetitions before (default 1)")
    parser.add_argument("--engine", choices=("aio_handle",), default="aio_handle", help="there is one")
    backends = ("auto", "io_uring", "libaio", "threads")
    parser.add_argument("--backend", choices=backends, default="auto", help="how requests reach the kernel")
    parser.switches(
        read="only read (default: write and read)",
        write="only write",
        sequential_requests="wait after each request: a queue depth of 1",
        single_submit="accepted; the engine submits as room comes free",
        include_warmup_time="count them",
        validate="read everything back, untimed, and compare",
        json="one JSON object instead of a table",
    )
    parser.refuse(_REFUSED)
    return parser


def _as_text(results: dict[str, Any], facts: dict[str, Any]) -> str:
    how = "past the page cache" if facts["direct"] else "through the page cache, as this filesystem has no O_DIRECT"
    lines = [
        f"{facts['folder']}: {facts['io_size'] / 1e6:.1f} MB, {how}",
        f"engine: {facts['backend']}, blocks of {facts['block_size'] >> 10} KiB, {facts['queue_depth']} under way, "
        f"threads {facts['io_parallel']}; plain: one thread, one block at a time",
        "",
        f"{'GB/s':<6} {'way':<7} {'median':>8} {'min':>8} {'max':>8} {'of plain':>9}",
    ]
    for operation, result in results.items():
        for way in WAYS:
            numbers = " ".join(f"{result[way][name]:>8.3f}" for name in ("median", "min", "max"))
            ratio = f"{result['ratio']:.2f}x" if way == "engine" else ""
            lines.append(f"{operation:<6} {way:<7} {numbers} {ratio:>9}".rstrip())
    return "\n".join(lines)


def run(argv: Sequence[str] | None, *, prog: str) -> str:
    """Measure as the command line says; a table, or JSON. Raises UsageError, DeepSpeedError, OSError, SystemExit."""
    options = _parser(prog).parse_args(argv)
    if options.warmup_loops < 0:
        raise UsageError(f"--warmup_loops is 0 or more, not {options.warmup_loops}")
    depth = 1 if options.sequential_requests else options.queue_depth
    load = Load(options.block_size, depth, options.io_parallel, options.backend)
    operations = tuple(name for name in ("write", "read") if getattr(options, name)) or ("write", "read")
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
        times = {"loops": options.loops, "warmup": options.warmup_loops, "count_warmup": options.include_warmup_time}
        rates = compare(target, engine, load, operations, validate=options.validate, **times)
    results: dict[str, Any] = {
        name: {way: spread(values) for way, values in ways.items()} for name, ways in rates.items()
    }
    for result in results.values():
        result["ratio"] = result["engine"]["median"] / result["plain"]["median"]
    return (
        json.dumps({**facts, "unit": "GB/s", "results": results}, indent=1)
        if options.json
        else _as_text(results, facts)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``ds_io``; returns the exit status."""
    return guarded("ds_io", lambda: run(argv, prog="ds_io"))


if __name__ == "__main__":
    sys.exit(main())
