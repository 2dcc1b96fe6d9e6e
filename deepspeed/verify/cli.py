"""``ds_verify``: check on this machine's CPU that sharded training computes what plain PyTorch computes.

    ds_verify grads                                     stage 0-3 on a small built-in model
    ds_verify grads --matrix                            stage x bucket x overlap x accumulation x model
    ds_verify grads --model my_model:build --config ds_config.json     your model under your configuration
    ds_verify loop                                      accumulation by hand, no_sync, two losses, penalties: any loop
    ds_verify gas                                       a global batch split over ranks and micro-batches: one gradient
    ds_verify optim                                     every optimizer, each group with its own rate and decay
    ds_verify lr                                        the rate counts updates: not ranks, micro-batches or skips
    ds_verify teardown --cycles 50                      a destroyed engine leaves neither memory nor hooks
    ds_verify compile                                   blocks compiled by inductor train alike, each as one graph
    ds_verify offload                                   device, cpu and nvme agree bit for bit on a small built-in model
    ds_verify offload --model my_model:build --config ds_config.json --folder /drive     on yours, on your drive
    ds_verify data --save-n 4 --load-n 3 --workers 2    an epoch resumed on other ranks: no sample twice, none missing
    ds_verify resume --steps 20 --at 10                 saved, ended and loaded training goes on bit for bit
    ds_verify resume --ranks 4 --load-ranks 3           the state survives a change of the number of ranks
    ds_verify crash --kills 200                         killed while saving: every resume finds a whole checkpoint
    ds_verify schedule --schedule zero_bubble           what the ranks of a pipeline do when, and how long they wait
    ds_verify 3d --matrix                               pipeline x tensor x data parallel x ZeRO against one process
    ds_verify 3d --checkpoints                          saved at one layout, loaded at others and back

Exit code: 0 all cells pass, 1 some cell fails, 2 the command or its files are wrong, 130 after Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import get_args

from deepspeed.config.model.blocks import PipelineSchedule
from deepspeed.observe.program import CommandLine, count_of, docstring_of, guarded, number_of, positive_of, whole_of
from deepspeed.verify import STEPS, TOLERANCE

SCHEDULES = get_args(PipelineSchedule)
_TOLERANCE = ("--tolerance", number_of, TOLERANCE, "N", "largest error allowed")


def _folder(text: str) -> str:
    """A folder that is there. Raises ArgumentTypeError."""
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return text


def _training(parser: CommandLine, config: str, *, steps: int, limit: float, ranks: int = 2) -> None:
    """What all gates take that train a model of ours or of the user."""
    model = "your own model (ds_verify grads --help says what build() returns)"
    parser.option("--model", str, None, "MODULE:BUILD", model)
    parser.option("--config", str, None, "FILE", config)
    _runs(parser, steps=steps, limit=limit, ranks=ranks)


def _runs(parser: CommandLine, *, steps: int, limit: float, ranks: int = 2) -> None:
    """What all gates take that train."""
    parser.option("--ranks", count_of, ranks, "N", "number of CPU ranks")
    parser.option("--steps", count_of, steps, "N", "optimizer steps of one run")
    parser.option("--time-limit", positive_of, limit, "N", "seconds one run may take")


def _grads(parser: CommandLine) -> None:
    """Compare gradients, norms and parameters with plain one-process PyTorch."""
    parser.switches(matrix="every combination of stage, bucket, overlap and accumulation")
    _training(parser, "the configuration to check your model under", steps=STEPS, limit=120.0)
    parser.option(*_TOLERANCE)


def _loop(parser: CommandLine) -> None:
    """Compare shapes of the training loop with plain one-process PyTorch."""
    _runs(parser, steps=3, limit=120.0)
    parser.option(*_TOLERANCE)


def _gas(parser: CommandLine) -> None:
    """Compare splits of a global batch with the whole batch in one process."""
    parser.option("--time-limit", positive_of, 120.0, "N", "seconds one run may take")
    parser.option(*_TOLERANCE)


def _optim(parser: CommandLine) -> None:
    """Compare optimizers and their groups with the same ones unsharded."""
    parser.switches(all="what is done anyway: every optimizer of the list")
    _loop(parser)


def _lr(parser: CommandLine) -> None:
    """Compare the learning rates of a run with plain PyTorch."""
    parser.option("--time-limit", positive_of, 120.0, "N", "seconds one run may take")


def _teardown(parser: CommandLine) -> None:
    """Count what is left of engines that were destroyed."""
    parser.option("--cycles", count_of, 50, "N", "engines that are made and destroyed in a row")
    parser.option("--ranks", count_of, 2, "N", "number of CPU ranks")
    parser.option("--growth", number_of, 1.0, "PERCENT", "by how much resident memory may grow")
    parser.option("--time-limit", positive_of, 300.0, "N", "seconds one row may take")


def _compiled(parser: CommandLine) -> None:
    """Compare compiled blocks with plain PyTorch; count graph breaks and recompilations."""
    _training(parser, "the configuration to check your model under", steps=4, limit=600.0)
    parser.option("--backend", str, "inductor", "NAME", "what compiles; aot_eager needs no C++ compiler")
    parser.option(*_TOLERANCE)


def _offload(parser: CommandLine) -> None:
    """Compare training with states on the device, in host memory and on a drive, bit for bit."""
    config = "the configuration to check it under; its offload blocks are replaced"
    _training(parser, config, steps=20, limit=300.0)
    parser.option("--folder", _folder, None, "PATH", "a folder on the drive (default: a temporary one)")


def _data(parser: CommandLine) -> None:
    """Count the samples of an epoch that is saved on some ranks and resumed on others."""
    parser.option("--save-n", count_of, 4, "N", "ranks that begin the epoch and save")
    parser.option("--load-n", count_of, 3, "N", "ranks that load and finish it")
    parser.option("--workers", whole_of, 2, "N", "worker processes of each rank's loader")
    parser.option("--samples", count_of, 997, "N", "samples of an epoch")
    parser.option("--batch", count_of, 4, "N", "samples of a batch on each rank")
    parser.option("--at", whole_of, None, "N", "steps before the save (default: a third of the epoch)")
    parser.option("--time-limit", positive_of, 180.0, "N", "seconds each of the two runs may take")


def _resume(parser: CommandLine) -> None:
    """Compare training that is saved and resumed with training in one go, bit for bit."""
    _training(parser, "the configuration to check it under", steps=20, limit=300.0)
    parser.option("--at", count_of, 10, "N", "steps before the save")
    parser.option("--load-ranks", count_of, None, "N", "number of ranks that load (default: as many)")


def _crash(parser: CommandLine) -> None:
    """Kill a job at random instants of its saves; every resume must find a whole checkpoint."""
    parser.option("--kills", count_of, 200, "N", "how often")
    parser.option("--ranks", count_of, 2, "N", "number of CPU ranks")
    parser.option("--seed", whole_of, 0, "N", "of the first kill; kill n has seed + n")
    stage = "how states are spread over the ranks (default 3)"
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help=stage)
    text = "where to save, for example on the filesystem in question (default: a temporary one)"
    parser.option("--folder", _folder, None, "PATH", text)
    background = "save in the background (checkpoint.async)"
    parser.add_argument("--async", dest="background", action="store_true", help=background)


def _schedule(parser: CommandLine) -> None:
    """Draw the schedule of a pipeline, with its bubble."""
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="as in the key pipeline.schedule")
    parser.option("--stages", count_of, 4, "N", "pipeline stages, one on each rank")
    parser.option("--micro-batches", count_of, 8, "N", "micro-batches of one update")
    parser.option("--chunks", count_of, None, "N", "parts of the model on each stage")
    parser.add_argument(
        "--costs", type=number_of, nargs=3, default=[1.0, 1.0, 1.0], metavar=("F", "I", "W"),
        help="time of a stage's forward, of its backward for inputs and of that for weights (default: 1 1 1)",
    )  # fmt: skip
    parser.option("--hop", number_of, 0.0, "T", "time of a message between two stages")
    parser.option("--png", Path, None, "FILE", "draw it there too (needs matplotlib)")


def _three_axes(parser: CommandLine) -> None:
    """Compare pipelines of tensor-parallel parts beside ZeRO with plain one-process PyTorch."""
    parser.switches(
        matrix="every combination of 1 and 2 data-parallel, pipeline and tensor-parallel ranks, ZeRO 0-3 and schedule",
        checkpoints="save at one layout, load at others and go back",
    )
    _training(parser, "the configuration to check it under", steps=STEPS, limit=300.0, ranks=8)
    parser.option("--pp", count_of, None, "N", "pipeline stages of one layout")
    parser.option("--tp", count_of, None, "N", "tensor-parallel ranks of one layout")
    parser.add_argument("--zero", type=int, choices=range(4), help="level of ZeRO (default: all)")
    parser.add_argument("--schedule", choices=SCHEDULES, help="as in the key pipeline.schedule")
    parser.option("--chunks", count_of, None, "N", "parts of the model on each stage")
    # An order of additions that another processor chose was seen to cost 1.03e-6.
    parser.option("--tolerance", number_of, 2e-6, "N", "largest error allowed")


# Name: module, which is imported when the line is right, and what adds its options.
_COMMANDS: dict[str, tuple[str, Callable[[CommandLine], None]]] = {
    "grads": ("grads", _grads),
    "loop": ("training.loop", _loop),
    "gas": ("training.gas", _gas),
    "optim": ("training.optim", _optim),
    "lr": ("training.lr", _lr),
    "teardown": ("training.teardown", _teardown),
    "compile": ("compiled", _compiled),
    "offload": ("offload", _offload),
    "data": ("data", _data),
    "resume": ("resume", _resume),
    "crash": ("crash", _crash),
    "schedule": ("schedule", _schedule),
    "3d": ("three_axes", _three_axes),
}


def _run(options: argparse.Namespace) -> int:
    common = import_module("deepspeed.verify.common")  # brings torch, as all commands do
    report = common.Printout(sys.stdout)
    try:
        return int(import_module(f"deepspeed.verify.{_COMMANDS[options.command][0]}").run(options, report))
    except (common.Finding, common.RankFailure) as failure:
        report.say(f"{failure}\nFAIL")
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    parser = CommandLine(prog="ds_verify", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(_COMMANDS)}}}")
    for name, (module, add_options) in _COMMANDS.items():
        home = "user_model" if name == "grads" else module
        about = docstring_of(f"deepspeed.verify.{home}") if name in words else None
        add_options(commands.add_parser(name, help=add_options.__doc__, description=about))
    options = parser.parse_args(words)
    return guarded("ds_verify", lambda: _run(options))


if __name__ == "__main__":
    sys.exit(main())
