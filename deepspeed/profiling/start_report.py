"""Report an engine at its start: one line, and what ``dump_state`` and ``memory_breakdown`` ask for."""

import logging
from math import isnan, prod

from deepspeed.client.engine_facts import EngineFacts
from deepspeed.comm.collectives import gather_objects
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.model.settings import declared_fields, settings
from deepspeed.errors import counted
from deepspeed.moe.utils import is_moe_param
from deepspeed.monitor.log import log_dist
from deepspeed.monitor.timers import see_memory_usage
from deepspeed.version import __version__
from deepspeed.zero.param import castable, local_of
from deepspeed.zero.plan import StatePlan
from deepspeed.zero.unit import Unit


def _rest(state: StatePlan | None) -> str:
    return "-" if state is None else f"{''.join(way.value for way in state.spread)} {state.tier.value}"


def _of_all_ranks(unit: Unit) -> int:
    """Return the elements of the whole tensors of which ``unit`` holds parts, and of experts that only others have."""
    experts = [p for p in unit.params if is_moe_param(p) and not hasattr(p, "tp_place")]
    ways = int(str(getattr(experts[0], "group_name", "1")).rpartition("_")[2]) if experts else 1
    return ways * sum(prod(segment.whole_shape) for segment in unit.layout.segments)


def state_dump(engine: EngineFacts) -> str:
    """Format the resolved keys with their origins, the units with their rest places, and the optimizer's groups."""
    secret = {field.path for field in declared_fields(DeepSpeedConfig) if not field.info.repr}
    shown = [item for item in settings(engine._config) if item.pattern not in secret]
    config = [f"  {item.path} = {item.value!r} ({item.origin})" for item in shown]
    units = [
        f"  {unit.name}: {sum(segment.numel for segment in unit.layout.segments):,} elements in "
        f"{counted(len(unit.params), 'parameter')}, {unit.dtype}, "
        f"PARAM {_rest(unit.plan.param)}, GRAD {_rest(unit.plan.grad)}, OPTIM {_rest(unit.plan.optim)}"
        for unit in engine.runtime.units
    ]
    options = [", ".join(f"{k}={v}" for k, v in g.items() if k != "params") for g in engine._groups()]
    optimizer = [f"  group {i}: {text}" for i, text in enumerate(options)]
    name = type(engine.basic_optimizer).__name__ if options else "none"
    return "\n".join(["configuration:", *config, f"units ({len(units)}):", *units, f"optimizer {name}:", *optimizer])


def report_start(engine: EngineFacts) -> None:
    """Log one line about ``engine``, and the reports of ``dump_state`` and ``memory_breakdown``."""
    units, plan, parts = engine.runtime.units, engine.runtime.plan, ""
    if plan.regular.param.sharded and engine.mesh.zero.size > 1:
        whole = sum(not unit.movable for unit in units)
        threshold = f"; stage3_param_persistence_threshold {plan.persistence_numel:,} keeps {whole} whole"
        parts = f" ({len(units) - whole} sharded{threshold if whole else ''})"
    log_dist(
        f"DeepSpeed {__version__}: {sum(map(_of_all_ranks, units)):,} parameters in "
        f"{counted(len(units), 'unit')}{parts}, ZeRO stage {engine.zero_optimization_stage()}, "
        f"{counted(engine.mesh.job.size, 'rank')}, {engine._config.compute_dtype}, batch {engine.train_batch_size()} = "
        f"micro-batch {engine._micro} x accumulation {engine._gas} x data-parallel ranks {engine.mesh.data.size}"
    )
    offloaded = any(state is not None and state.away for unit in units for state in (unit.plan.param, unit.plan.optim))
    if offloaded or plan.offload.host_limit or plan.offload.device_limit:
        log_dist(f"{'; '.join(engine.places())}\n{engine.memory_plan().table()}")
    if engine.dump_state():
        log_dist(f"dump_state\n{state_dump(engine)}")
    if engine._parts.born_sharded:
        pairs = [p for u in units if castable(u.dtype) for p in zip(u.layout.segments, u.params, strict=True)]
        ends = {s.name: local_of(getattr(p, "ds_tensor", p)).flatten()[-1:].tolist() for s, p in pairs}
        mine = [name for name, end in ends.items() if any(map(isnan, end))]
        if names := [*dict.fromkeys(name for part in gather_objects(mine, engine.mesh.zero) for name in part)]:
            log_dist(
                f"never initialised, NaN: {counted(len(names), 'parameter')} ({', '.join(names[:8])}). "
                "Transformers' from_config can leave a model so: build it by its class inside deepspeed.zero.Init",
                level=logging.WARNING,
            )
    see_memory_usage("memory after initialize", force=engine.memory_breakdown())
