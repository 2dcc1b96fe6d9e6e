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
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed.bench.common import size_of
from deepspeed.config import DeepSpeedConfig, load_config
from deepspeed.config.parse import read_config_source
from deepspeed.device import DTYPES
from deepspeed.errors import UsageError
from deepspeed.observe.program import CommandLine, count_of, guarded, say, size
from deepspeed.simulate.costs import load_machine, machines
from deepspeed.simulate.models import subject_of
from deepspeed.simulate.pipeline.run import ways_of
from deepspeed.simulate.plan.adapters import ALL_LINEAR, AdaptedLinear, Lora, adapted
from deepspeed.simulate.run import RankJob, look_at_start
from deepspeed.zero.memory.fit import MemoryPlan

_LISTED = 8


def _parser() -> CommandLine:
    parser = CommandLine(prog="ds_plan", description=__doc__)
    parser.option("--model", str, None, "M", "module:build, or a Hugging Face config.json")
    parser.option("--config", str, None, "FILE", "the DeepSpeed configuration")
    parser.option("--gpus", count_of, 8, "N", "devices of the job")
    parser.option("--gpu", size_of, None, "SIZE", "exit 1 where the states need more than this of a device")
    parser.option("--device", str, "h100", "D", f"whose nodes: {', '.join(machines())} or a JSON file")
    text = "adapters of rank R, written 16 or r=16; all else is frozen"
    parser.option("--lora", lambda rank: count_of(rank.removeprefix("r=")), None, "R", text)
    text = f"names with commas between, a regular expression, or {ALL_LINEAR} (the default): which layers get adapters"
    parser.option("--lora_targets", str, None, "NAMES", text)
    parser.add_argument(
        "--lora_dtype", choices=sorted(DTYPES), default=None,
        help="of adapters, where the configuration leaves parameters in their own (default fp32, as PEFT makes them)",
    )  # fmt: skip
    parser.switches(json="print facts as JSON")
    return parser


def _lora_of(options: argparse.Namespace, config: DeepSpeedConfig) -> Lora | None:
    """The adapters that are asked for. Raises UsageError for what does not go together."""
    if options.lora is None:
        for name in ("lora_targets", "lora_dtype"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is about adapters; give their rank too, for example --lora 16")
        return None
    if config.optimizer is None:
        raise UsageError(
            '--lora: the configuration has no block "optimizer", so nothing would be trained; add the one that your '
            "program makes"
        )
    if config.tensor_parallel.ways > 1:
        raise UsageError("--lora: adapters on tensor-parallel layers are not planned; leave out tensor_parallel")
    compute, wanted = config.dtype_policy.compute, options.lora_dtype
    keep = config.data_types.keep_in_fp32_modules
    apart = wanted == "fp32" and {"lora_A", "lora_B"} <= set(() if isinstance(keep, str) else keep)
    if compute and wanted not in (None, compute) and not apart:
        raise UsageError(
            f"--lora_dtype {wanted}: this configuration trains every parameter in {compute}; leave the option out, or "
            'keep adapters in fp32 with "data_types": {"keep_in_fp32_modules": ["lora_A", "lora_B"]}'
        )
    return Lora(options.lora, options.lora_targets or ALL_LINEAR, DTYPES[wanted] if wanted else None)


def _look(engine: Any, lora: Lora | None) -> tuple[dict[str, Any], MemoryPlan]:
    """What a start says, for programs and as the engine's plan."""
    model, memory = engine.module, engine.memory_plan()
    trained = [param for unit in engine.runtime.units if unit.trainable for param in unit.params]
    total, those = (sum(getattr(p, "ds_numel", p.numel()) for p in some) for some in (model.parameters(), trained))
    facts: dict[str, Any] = {"parameters": total, "trained": those}
    if lora is not None:
        layers = [path for path, module in model.named_modules() if isinstance(module, AdaptedLinear)]
        facts["lora"] = {"rank": lora.rank, "layers": layers}
    facts["bytes"] = {x.what: {"device": x.device, "host": x.host, "drive": x.drive} for x in memory.lines}
    facts["together"] = {"device": memory.device, "host": memory.host, "drive": memory.drive}
    return facts, memory


def _text(facts: dict[str, Any], memory: MemoryPlan, title: str) -> str:
    trained, total = facts["trained"], facts["parameters"]
    train = (
        f"{trained:,} of {total:,} parameters are trained" if trained else f"none of {total:,} parameters is trained"
    )
    lines = [f"{title}: {train}"]
    if "lora" in facts:
        rank, layers = facts["lora"].values()
        names = sorted({path.rpartition(".")[2] for path in layers})
        more = ", ..." if len(names) > _LISTED else ""
        lines.append(f"LoRA of rank {rank} on {len(layers)} layers ({', '.join(names[:_LISTED])}{more})")
    return "\n".join([*lines, "", memory.table(), "", "beside them: activations and inputs (ds_simulate)"])


def _run(options: argparse.Namespace) -> int:
    if ways_of(read_config_source(options.config), options.gpus) > 1:
        raise UsageError("pipeline.stages: each stage has states of its own; ds_simulate shows a rank of each")
    machine, config = load_machine(options.device), load_config(options.config, world_size=options.gpus)
    lora = _lora_of(options, config)
    subject = subject_of(options.model, samples=1, sequence=None, recompute=False)
    subject = subject if lora is None else adapted(subject, lora)
    job = RankJob(config.source, machine, options.gpus)
    facts, memory = look_at_start(job, subject, functools.partial(_look, lora=lora))
    title = f"{subject.name}, one of {options.gpus} ranks"
    say(json.dumps(facts, indent=1) if options.json else _text(facts, memory, title))
    if options.gpu is None or memory.device <= options.gpu:
        return 0
    most = max(memory.lines, key=lambda line: line.device)
    sys.stderr.write(
        f"ds_plan: --gpu: the states of a rank need {size(memory.device)} of a device, not {size(options.gpu)}; "
        f"the largest part is {most.what}, {size(most.device)}\n"
    )
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if missing := [f"--{name}" for name in ("model", "config") if getattr(options, name) is None]:
        parser.error(f"{' and '.join(missing)} must be given")
    return guarded("ds_plan", lambda: _run(options))


if __name__ == "__main__":
    sys.exit(main())
