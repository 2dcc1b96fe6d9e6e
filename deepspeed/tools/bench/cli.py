"""``ds_bench``: the measurements under one name.

ds_bench io         throughput of a folder's drive; the same as ds_io, and as ds_bench nvme
ds_bench ckpt       how long saving a checkpoint holds training, and until it is on the drive
ds_bench load       what getting its part of a model from safetensors files costs each rank
ds_bench access     what reading whole gradients, weights and optimizer states costs
ds_bench vs-fsdp2   the same model under ZeRO-3 and torch's FSDP2
ds_bench stream     whole weights out of a running engine, beside plain messages of as many bytes
ds_bench cpu-adam   the optimizer in host memory beside torch's, and beside what the memory gives

Each with --help lists its options. deepspeed.comm.log_summary() times the collectives of a training run.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from deepspeed.errors import nearest_hint
from deepspeed.monitor.program import BAD_INPUT, CommandLine, docstring_of, guarded
from deepspeed.tools.bench import options

# Name: module; the function of the same name in ``options`` adds what the measurement may be told.
_MODULES = {"io": "io", "nvme": "io", "ckpt": "ckpt", "load": "load", "cpu-adam": "cpu_adam", "access": "access"}
_MODULES |= {"vs-fsdp2": "vs_fsdp2", "stream": "stream"}


def _measured(prog: str, name: str, words: Sequence[str] | None = None) -> int:
    """Run the measurement of module ``name``, which is imported when the line is right; return the exit status."""
    parser = CommandLine(prog=prog, description=docstring_of(f"deepspeed.tools.bench.{name}"), allow_abbrev=False)
    getattr(options, name)(parser)
    parser.switches(json="one JSON object instead of a table")
    words = sys.argv[1:] if words is None else words
    if name in ("io", "ckpt") and words and not words[0].startswith("-"):
        words = ["--folder", *words]
    plan = parser.parse_args(words)

    def run() -> str | dict[str, Any]:
        module = import_module(f"deepspeed.tools.bench.{name}")
        facts: dict[str, Any] = module.measure(plan)
        return facts if plan.json else str(module.as_text(facts, plan))

    return guarded(prog, run)


ds_io = partial(_measured, "ds_io", "io")
ds_nvme_tune = partial(_measured, "ds_nvme_tune", "tune")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    command = words[0] if words else ""
    if command in _MODULES:
        return _measured(f"ds_bench {command}", _MODULES[command], words[1:])
    if command in ("-h", "--help"):
        return guarded("ds_bench", lambda: str(__doc__))
    fault = "nothing to measure was named"
    if command:
        fault = f"there is no measurement {command!r}{nearest_hint(command, _MODULES)}"
    sys.stderr.write(f"ds_bench: {fault}\n{__doc__}")
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
