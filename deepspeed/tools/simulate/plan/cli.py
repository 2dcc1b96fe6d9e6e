"""``ds_plan``: what the model states of a rank will hold, per tier, before any of it exists.

    ds_plan --model config.json --config ds_config.json --gpus 8
    ds_plan --model my_model:build --config ds_config.json --gpus 8 --gpu 80GiB      exit 1 where a device needs more
    ds_plan ... --lora 16                                    a LoRA fine-tune: adapters of rank 16, all else frozen
    ds_plan ... --lora 16 --lora_targets q_proj,v_proj       the same, with adapters on these modules only

It is the engine's own plan: the engine is started in this process, on devices that do not exist, so rows, units,
padding and the optimizer's states are those of a real start. Counted are parameters, gradients and optimizer states at
rest, units gathered at once, gradients on their way and buffers for drives; not counted are activations and inputs,
which ds_simulate shows.

Frozen parameters have neither gradients nor masters nor optimizer states. --lora lays adapters out as PEFT does. Its
targets are PEFT's, names of modules or a regular expression for whole paths; a model that has adapters needs no --lora.

Exit code: 0 all is well, 1 the states are larger than --gpu, 2 the command or its files are wrong or what the
configuration allows is too little, 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from deepspeed.config.model.values import DTYPE_NAMES
from deepspeed.config.parse import read_config_source
from deepspeed.monitor.program import CommandLine, count_of, guarded
from deepspeed.tools.bench.common import size_of
from deepspeed.tools.simulate.costs import load_machine, machines


def _rank_of(text: str) -> int:
    """Parse ``16`` or ``r=16``."""
    return count_of(text.removeprefix("r="))


def _parser() -> CommandLine:
    parser = CommandLine(prog="ds_plan", description=__doc__)
    parser.option("--model", str, None, "M", "module:build, or a Hugging Face config.json")
    parser.option("--config", str, None, "FILE", "the DeepSpeed configuration")
    parser.option("--gpus", count_of, 8, "N", "devices of the job")
    parser.option("--gpu", size_of, None, "SIZE", "exit 1 where the states need more than this of a device")
    parser.option("--device", str, "h100", "D", f"whose nodes: {', '.join(machines())} or a JSON file")
    parser.option("--lora", _rank_of, None, "R", "adapters of rank R, written 16 or r=16; all else is frozen")
    text = "names with commas between, a regular expression, or all-linear (the default): which layers get adapters"
    parser.option("--lora_targets", str, None, "NAMES", text)
    parser.add_argument(
        "--lora_dtype", choices=sorted(DTYPE_NAMES), default=None,
        help="of adapters, where the configuration leaves parameters in their own (default fp32, as PEFT makes them)",
    )  # fmt: skip
    parser.switches(json="print facts as JSON")
    return parser


def _run(options: argparse.Namespace) -> int:
    source, machine = read_config_source(options.config), load_machine(options.device)
    status: int = import_module("deepspeed.tools.simulate.plan.start").run(options, source, machine)  # brings torch
    return status


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if missing := [f"--{name}" for name in ("model", "config") if getattr(options, name) is None]:
        parser.error(f"{' and '.join(missing)} must be given")
    for name in ("lora_targets", "lora_dtype"):
        if options.lora is None and getattr(options, name) is not None:
            parser.error(f"--{name} is about adapters; give their rank too, for example --lora 16")
    return guarded("ds_plan", lambda: _run(options))


if __name__ == "__main__":
    sys.exit(main())
