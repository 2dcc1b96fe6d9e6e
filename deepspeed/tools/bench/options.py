"""What each measurement may be told. Nothing here imports torch: a wrong line costs no seconds."""

import argparse
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from deepspeed.monitor.program import CommandLine, count_of, number_of, whole_of
from deepspeed.tools.bench.common import block_of, params_of, size_of

_MOST_THREADS = 4096  # more crash the runtimes of cpu-adam


def _times(text: str) -> float:
    """Parse ``1.3x-shard`` or ``1.3``. Raises ArgumentTypeError."""
    if not re.fullmatch(r"\d+(\.\d+)?(x-shard)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no multiple of a shard; write for example 1.3x-shard")
    return float(text.removesuffix("x-shard"))


def add_training(parser: CommandLine, *, levels: Sequence[int] = range(4), least: int = 1) -> None:
    """Add options of a command that trains a model under one of these ZeRO ``levels``, on at least ``least`` ranks."""
    parser.option("--params", params_of, "8M", "N", "about, for example 8M or 1e9")
    parser.option("--ranks", partial(count_of, least=least), 2, "N", "processes")
    parser.option("--rows", count_of, 256, "N", "samples of a micro-batch")
    parser.option("--steps", count_of, 10, "N", "timed steps")
    if levels:
        parser.add_argument("--zero", dest="level", type=int, choices=levels, default=3, help="its level (default 3)")


def io(parser: CommandLine) -> None:
    parser.add_argument("--folder", required=True, help="folder on the drive to be measured")
    parser.option("--io_size", size_of, "1G", "BYTES", "size of the file")
    parser.option("--block_size", block_of, "1M", "BYTES", "bytes of one request")
    parser.option("--queue_depth", count_of, 32, "N", "requests under way")
    threads = "threads where the page cache is in the way, or the backend is threads"
    parser.option("--io_parallel --threads", count_of, 1, "N", threads)
    parser.option("--loops", count_of, 3, "N", "repetitions")
    parser.option("--warmup_loops", whole_of, 1, "N", "untimed repetitions before")
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
    )


def ckpt(parser: CommandLine) -> None:
    parser.add_argument("--folder", required=True, help="where to save: a folder on the drive to be measured")
    parser.option("--params", params_of, "134M", "N", "about, for example 8M or 1e9")
    parser.option("--every", count_of, 5, "N", "steps from one save to the next")
    parser.option("--steps", count_of, 20, "N", "steps in all")
    parser.option("--ranks", count_of, 2, "N", "processes")
    kind = parser.add_mutually_exclusive_group()
    text = "save in the background (default)"
    kind.add_argument("--async", dest="background", action="store_true", default=True, help=text)
    kind.add_argument("--sync", dest="background", action="store_false", help="training waits until a save has ended")


def load(parser: CommandLine) -> None:
    parser.add_argument("--model", required=True, metavar="FOLDER", help="safetensors files, as of save_pretrained")
    parser.option("--ranks", count_of, 2, "N", "processes")
    parser.add_argument("--zero", dest="level", type=int, choices=(0, 3), default=3, help="its level (default 3)")
    parser.option("--max-rss", _times, "1.3x-shard", "N", "the bound, in parts of a rank")
    parser.switches(transformers="load with from_pretrained, under ZeRO-3")


access = add_training


def vs_fsdp2(parser: CommandLine) -> None:
    add_training(parser, levels=())
    parser.option("--rounds", count_of, 3, "N", "times each has its turn")


def stream(parser: CommandLine) -> None:
    add_training(parser, least=2)  # of one rank nothing travels
    parser.option("--max-bytes", size_of, "64M", "SIZE", "most bytes of a bucket")


def cpu_adam(parser: CommandLine) -> None:
    parser.option("--params", params_of, "50M", "N", "elements, for example 8M or 1e9")
    threads = partial(count_of, most=_MOST_THREADS)
    parser.option("--threads", threads, None, "N", "of every contender (default: as many as torch uses)")


def tune(parser: CommandLine) -> None:
    parser.add_argument("--nvme_dir", required=True, metavar="DIR", help="folder on the drive")
    parser.option("--seconds", number_of, 60.0, "N", "time to spend, about")
    parser.option("--sweep_config", str, None, "FILE", "JSON with lists under block_size, queue_depth and io_parallel")
    parser.option("--io_size", size_of, "400M", "BYTES", "size of the file at most")
    parser.option("--loops", count_of, 1, "N", "measure each setting N times, whatever the time")
    config = "training configuration (strict JSON) that gets the block; nothing else in it changes"
    parser.option("--config", Path, None, "FILE", config)
    parser.option("--output", Path, None, "FILE", 'write {"aio": ...} to FILE')
    parser.option("--log_dir", str, None, "DIR", "accepted; no logs are written, --json has everything")
    parser.switches(
        no_read="do not measure reads",
        no_write="do not measure writes",
        flush_page_cache="accepted; nothing is measured through the page cache if it can be helped",
        verbose="accepted",
    )
