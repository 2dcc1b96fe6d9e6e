"""What ``ds_plan`` does when its line is right: a start on devices that do not exist, and what it says."""

import argparse
import functools
import json
import sys
from typing import Any

from deepspeed.accelerator.device import DTYPES
from deepspeed.config import DeepSpeedConfig, load_config
from deepspeed.errors import UsageError, counted
from deepspeed.monitor.program import say, size
from deepspeed.tools.simulate.costs import Machine
from deepspeed.tools.simulate.models import subject_of
from deepspeed.tools.simulate.pipeline.run import ways_of
from deepspeed.tools.simulate.plan.adapters import ALL_LINEAR, AdaptedLinear, Lora, adapted
from deepspeed.tools.simulate.run import RankJob, look_at_start, whole_numel
from deepspeed.zero.memory.fit import MemoryPlan

_LISTED = 8


def _lora_of(options: argparse.Namespace, config: DeepSpeedConfig) -> Lora | None:
    """Return the adapters that are asked for. Raises UsageError for options that do not go together."""
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


def _look(engine: Any, lora: Lora | None) -> tuple[dict[str, Any], MemoryPlan]:
    """Return the facts of a start, for programs, and the engine's memory plan."""
    model, memory = engine.module, engine.memory_plan()
    trained = [param for unit in engine.runtime.units if unit.trainable for param in unit.params]
    total, trainable = (sum(map(whole_numel, some)) for some in (model.parameters(), trained))
    facts: dict[str, Any] = {"parameters": total, "trained": trainable}
    if lora is not None:
        layers = [path for path, module in model.named_modules() if isinstance(module, AdaptedLinear)]
        facts["lora"] = {"rank": lora.rank, "layers": layers}
    facts |= _per_token(engine)
    facts["bytes"] = {x.what: {"device": x.device, "host": x.host, "drive": x.drive} for x in memory.lines}
    facts["together"] = {"device": memory.device, "host": memory.host, "drive": memory.drive}
    return facts, memory


def _per_token(engine: Any) -> dict[str, Any]:
    """Return bytes on the device for each token of a rank: inputs of blocks, which recomputation keeps, with the ranks
    that share a sequence; and the most of an exchange of experts: its hidden state by receiving rank, before and after
    the way, and by chosen expert. Nothing where sizes are not known.
    """
    config, mesh = getattr(engine.module, "config", None), engine.mesh
    names = "hidden_size", "num_hidden_layers", "num_experts_per_tok"
    width, blocks, choices = (getattr(config, name, 0) or 0 for name in names)
    ranks = max((group.size for group in mesh.experts), default=0)
    width *= max(param.element_size() for param in engine.module.parameters())
    kept = {"block_input_bytes_per_token": blocks * width, "sequence_ranks": mesh.sp.size} if blocks * width else {}
    exchanged = (2 * min(choices, ranks) + choices) * width
    return kept | ({"exchange_bytes_per_token": exchanged} if ranks and exchanged else {})


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
    beside = ["beside them: activations and inputs (ds_simulate)"]
    if nbytes := facts.get("block_input_bytes_per_token"):
        share = f"; {facts['sequence_ranks']} ranks share a sequence" * (facts["sequence_ranks"] > 1)
        beside.append(f"with recomputation, inputs of blocks: {size(1000 * nbytes)} for 1,000 tokens of a rank{share}")
    if nbytes := facts.get("exchange_bytes_per_token"):
        beside.append(f"an exchange of experts: at most {size(1000 * nbytes)} of these for 1,000 tokens of a rank")
    return "\n".join([*lines, "", memory.table(), "", *beside])


def run(options: argparse.Namespace, source: dict[str, Any], machine: Machine) -> int:
    """Start the engine as ``source`` says and print what it plans; return the exit status."""
    if ways_of(source, options.gpus) > 1:
        raise UsageError("pipeline.stages: each stage has states of its own; ds_simulate shows a rank of each")
    config = load_config(options.config, world_size=options.gpus)
    lora = _lora_of(options, config)
    subject = subject_of(options.model, samples=1, sequence=None, recompute=False)
    subject = subject if lora is None else adapted(subject, lora)
    job = RankJob(config.source, machine, options.gpus)
    facts, memory = look_at_start(job, subject, functools.partial(_look, lora=lora))
    title = f"{subject.name}, one of {counted(options.gpus, 'rank')}"
    say(json.dumps(facts, indent=1) if options.json else _text(facts, memory, title))
    if options.gpu is None or memory.device <= options.gpu:
        return 0
    most = max(memory.lines, key=lambda line: line.device)
    sys.stderr.write(
        f"ds_plan: --gpu: the states of a rank need {size(memory.device)} of a device, not {size(options.gpu)}; "
        f"the largest part is {most.what}, {size(most.device)}\n"
    )
    return 1
