"""``ds_verify``: check on this machine's CPU that sharded training computes what plain PyTorch computes, wherever
states rest.

    ds_verify grads                                             on a small built-in model
    ds_verify grads --model my_model:build --config ds_config.json     your model under your configuration

Exit code: 0 all cells pass, 1 some cell fails, 2 the command or its files are wrong, 130 after Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from deepspeed.config.model.blocks import PipelineSchedule
from deepspeed.monitor.program import CommandLine, count_of, docstring_of, guarded, number_of, positive_of, whole_of
from deepspeed.tools.verify import STEPS, TOLERANCE

SCHEDULES = get_args(PipelineSchedule)


def folder(text: str) -> str:
    """Take a folder that exists. Raises ArgumentTypeError."""
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return text


def _option(kind: Callable[[str], Any], metavar: Any, text: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "metavar": metavar, "help": text, **more}


def _switch(text: str, **more: Any) -> dict[str, Any]:
    return {"action": "store_true", "help": text, **more}


# What an option takes and means, whichever gates have it.
OPTIONS: dict[str, dict[str, Any]] = {
    "model": _option(str, "MODULE:BUILD", "your own model (ds_verify grads --help says what build() returns)"),
    "config": _option(str, "FILE", "the configuration to check it under"),
    "ranks": _option(count_of, "N", "number of CPU ranks"),
    "steps": _option(count_of, "N", "optimizer steps of one run"),
    "time_limit": _option(positive_of, "N", "seconds one run may take"),
    "tolerance": _option(number_of, "N", "largest error allowed"),
    "matrix": _switch("grads: stage x bucket x overlap x accumulation x model; 3d: layout x ZeRO x schedule"),
    "all": _switch("what is done anyway: every optimizer of the list"),
    "cycles": _option(count_of, "N", "engines that are made and destroyed in a row"),
    "growth": _option(number_of, "PERCENT", "by how much resident memory may grow"),
    "backend": _option(str, "NAME", "what compiles; aot_eager needs no C++ compiler"),
    "folder": _option(folder, "PATH", "where to save, for example on the drive in question (default: a temporary one)"),
    "save_n": _option(count_of, "N", "ranks that begin the epoch and save"),
    "load_n": _option(count_of, "N", "ranks that load and finish it"),
    "workers": _option(whole_of, "N", "worker processes of each rank's loader"),
    "samples": _option(count_of, "N", "samples of an epoch"),
    "batch": _option(count_of, "N", "samples of a batch on each rank"),
    "at": _option(count_of, "N", "steps before the save"),
    "epoch_at": _option(whole_of, "N", "steps before the save (default: a third of the epoch)", flag="--at"),
    "load_ranks": _option(count_of, "N", "number of ranks that load (default: as many)"),
    "kills": _option(count_of, "N", "how often"),
    "seed": _option(whole_of, "N", "of the first kill; kill n has seed + n"),
    "stage": _option(int, None, "how states are spread over the ranks", choices=range(4)),
    "background": _switch("save in the background (checkpoint.async)", flag="--async"),
    "checkpoints": _switch("save at one layout, load at others and go back"),
    "pp": _option(count_of, "N", "pipeline stages of one layout"),
    "tp": _option(count_of, "N", "tensor-parallel ranks of one layout"),
    "zero": _option(int, None, "level of ZeRO (default: all)", choices=range(4)),
    "schedule": _option(str, None, "as in the key pipeline.schedule", choices=SCHEDULES),
    "stages": _option(count_of, "N", "pipeline stages, one on each rank"),
    "micro_batches": _option(count_of, "N", "micro-batches of one update"),
    "chunks": _option(count_of, "N", "parts of the model on each stage"),
    "costs": _option(number_of, ("F", "I", "W"), "time of a forward, a backward for inputs, one for weights", nargs=3),
    "hop": _option(number_of, "T", "time of a message between two stages"),
    "png": _option(Path, "FILE", "draw it there too (needs matplotlib)"),
}
_MODEL: dict[str, Any] = dict(model=None, config=None)
_NAMED: dict[str, Any] = dict(ranks=2, steps=STEPS, time_limit=120.0, tolerance=TOLERANCE)
_BITWISE: dict[str, Any] = dict(**_MODEL, ranks=2, steps=20, time_limit=300.0)
_EPOCH = dict(save_n=4, load_n=3, workers=2, samples=997, batch=4, epoch_at=None, time_limit=180.0)
# An order of additions that another processor chose was seen to cost 1.03e-6.
_LAYOUTS: dict[str, Any] = dict(**_MODEL, ranks=8, steps=STEPS, time_limit=300.0, tolerance=2e-6)
_LAYOUTS |= dict(pp=None, tp=None, zero=None, schedule=None, chunks=None)
_PICTURE = dict(schedule="1f1b", stages=4, micro_batches=8, chunks=None, costs=[1.0, 1.0, 1.0], hop=0.0, png=None)
# Module and function of a gate, and its options with their defaults. The docstring of the function is the help text,
# read from the source: the module is imported, and torch with it, when the line is right.
GATES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grads": ("grads", "check_gradients", dict(matrix=False, **_MODEL, **_NAMED)),
    "loop": ("training", "check_loops", _NAMED),
    "gas": ("training", "check_splits", dict(time_limit=120.0, tolerance=TOLERANCE)),
    "optim": ("training", "check_optimizers", dict(all=False, **_NAMED)),
    "lr": ("training", "check_rates", dict(time_limit=120.0)),
    "teardown": ("teardown", "check_teardown", dict(cycles=50, ranks=2, growth=1.0, time_limit=300.0)),
    "compile": ("grads", "check_compiled", dict(_MODEL | _NAMED, steps=4, time_limit=600.0, backend="inductor")),
    "offload": ("resume", "check_offload", dict(**_BITWISE, folder=None)),
    "data": ("data", "check_data", _EPOCH),
    "resume": ("resume", "check_resume", dict(**_BITWISE, at=10, load_ranks=None)),
    "crash": ("crash", "check_crashes", dict(kills=200, ranks=2, seed=0, stage=3, folder=None, background=False)),
    "schedule": ("layouts.schedule", "check_schedule", _PICTURE),
    "moe": ("layouts.moe", "check_experts", dict(**_MODEL, **{**_NAMED, "ranks": 4})),
    "sp": ("layouts.sp", "check_sequences", dict(**_MODEL, **{**_NAMED, "ranks": 4})),
    "3d": ("layouts.three_axes", "check_layouts", dict(matrix=False, checkpoints=False, **_LAYOUTS)),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    described = {word for word in words if word in GATES} or {*GATES}  # reading all of them takes a while
    parser = CommandLine(prog="ds_verify", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(GATES)}}}")
    for command, (module, function, defaults) in GATES.items():
        about = docstring_of(f"deepspeed.tools.verify.{module}", function) if command in described else ""
        of_gate = commands.add_parser(command, help=about.partition("\n")[0], description=about)
        for name, default in defaults.items():
            ending = "" if default is None or default is False else " (default %(default)s)"
            settings = {"flag": f"--{name.replace('_', '-')}", **OPTIONS[name], "dest": name, "default": default}
            settings["help"] += ending
            of_gate.add_argument(settings.pop("flag"), **settings)
    options = parser.parse_args(words)
    module, function, _ = GATES[options.command]
    driver = "deepspeed.tools.verify.driver"
    return guarded("ds_verify", lambda: import_module(driver).run_gate(module, function, options))


if __name__ == "__main__":
    sys.exit(main())
