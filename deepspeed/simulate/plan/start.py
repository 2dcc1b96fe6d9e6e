"""What ``ds_plan`` does when its line is right: a start on devices that do not exist, and what it says."""

import argparse
import json
import sys
from typing import Any, NamedTuple

from deepspeed.config import DeepSpeedConfig, load_config
from deepspeed.device import DTYPES
from deepspeed.errors import UsageError
from deepspeed.observe.program import say, size
from deepspeed.simulate.costs import Machine
from deepspeed.simulate.models import subject_of
from deepspeed.simulate.pipeline.run import ways_of
from deepspeed.simulate.plan.adapters import ALL_LINEAR, AdaptedLinear, Lora, adapted
from deepspeed.simulate.run import RankJob, look_at_start
from deepspeed.zero.memory.fit import MemoryPlan

_LISTED = 8


class Planned(NamedTuple):
    """What a start says: elements of the model, those that train, the layers with adapters, and the plan."""

    parameters: int
    trained: int
    layers: list[str]
    memory: MemoryPlan


def _lora_of(options: argparse.Namespace, config: DeepSpeedConfig) -> Lora | None:
    """The adapters that are asked for. Raises UsageError for what does not go together."""
    if options.lora is None:
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


def _look(engine: Any) -> Planned:
    model = engine.module
    layers = [path for path, module in model.named_modules() if isinstance(module, AdaptedLinear)]
    trained = [param for unit in engine.runtime.units if unit.trainable for param in unit.params]
    total, those = (sum(getattr(p, "ds_numel", p.numel()) for p in some) for some in (model.parameters(), trained))
    return Planned(total, those, layers, engine.memory_plan())


def _facts(planned: Planned, lora: Lora | None) -> dict[str, Any]:
    memory = planned.memory
    together = {"device": memory.device, "host": memory.host, "drive": memory.drive}
    lines = {x.what: {"device": x.device, "host": x.host, "drive": x.drive} for x in memory.lines}
    facts: dict[str, Any] = {"parameters": planned.parameters, "trained": planned.trained}
    if lora is not None:
        facts["lora"] = {"rank": lora.rank, "layers": planned.layers}
    return facts | {"bytes": lines, "together": together}


def _text(planned: Planned, lora: Lora | None, title: str) -> str:
    train = f"{planned.trained:,} of {planned.parameters:,} parameters are trained"
    lines = [f"{title}: {train if planned.trained else f'none of {planned.parameters:,} parameters is trained'}"]
    if lora is not None:
        names = sorted({path.rpartition(".")[2] for path in planned.layers})
        more = ", ..." if len(names) > _LISTED else ""
        lines.append(f"LoRA of rank {lora.rank} on {len(planned.layers)} layers ({', '.join(names[:_LISTED])}{more})")
    return "\n".join([*lines, "", planned.memory.table(), "", "beside them: activations and inputs (ds_simulate)"])


def run(options: argparse.Namespace, source: dict[str, Any], machine: Machine) -> int:
    """Start the engine as ``source`` says and print what it plans; the exit status."""
    if ways_of(source, options.gpus) > 1:
        raise UsageError("pipeline.stages: each stage has states of its own; ds_simulate shows a rank of each")
    config = load_config(options.config, world_size=options.gpus)
    lora = _lora_of(options, config)
    subject = subject_of(options.model, samples=1, sequence=None, recompute=False)
    subject = subject if lora is None else adapted(subject, lora)
    planned = look_at_start(RankJob(config.source, machine, options.gpus), subject, _look)
    title = f"{subject.name}, one of {options.gpus} ranks"
    say(json.dumps(_facts(planned, lora), indent=1) if options.json else _text(planned, lora, title))
    if options.gpu is None or (need := planned.memory.device) <= options.gpu:
        return 0
    most = max(planned.memory.lines, key=lambda line: line.device)
    sys.stderr.write(
        f"ds_plan: --gpu: the states of a rank need {size(need)} of a device, not {size(options.gpu)}; the largest "
        f"part is {most.what}, {size(most.device)}\n"
    )
    return 1
