"""What an engine says about itself when it starts, and the log of its collectives."""

from typing import TYPE_CHECKING

from deepspeed.comm import trace
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.model.settings import declared_fields, settings
from deepspeed.mesh.groups import Mesh
from deepspeed.observe.log import log_dist
from deepspeed.observe.memory import see_memory_usage
from deepspeed.version import __version__
from deepspeed.zero.plan import StatePlan

if TYPE_CHECKING:
    from deepspeed.engine import DeepSpeedEngine


def _rest(state: StatePlan | None) -> str:
    return "-" if state is None else f"{''.join(way.value for way in state.spread)} {state.tier.value}"


def state_dump(engine: "DeepSpeedEngine") -> str:
    """Every resolved key with its origin, the units with their rest places, and the optimizer's groups; several
    lines.
    """
    secret = {field.path for field in declared_fields(DeepSpeedConfig) if not field.info.repr}
    shown = [item for item in settings(engine._config) if item.pattern not in secret]
    config = [f"  {item.path} = {item.value!r} ({item.origin})" for item in shown]
    units = [
        f"  {unit.name}: {sum(s.numel for s in unit.layout.segments):,} elements in {len(unit.params)} "
        f"parameters, {unit.full.dtype}, "
        f"PARAM {_rest(unit.plan.param)}, GRAD {_rest(unit.plan.grad)}, OPTIM {_rest(unit.plan.optim)}"
        for unit in engine.runtime.units
    ]
    groups = engine.basic_optimizer.param_groups if engine.basic_optimizer is not None else []
    optimizer = [
        f"  group {i}: " + ", ".join(f"{k}={v}" for k, v in g.items() if k != "params") for i, g in enumerate(groups)
    ]
    name = type(engine.basic_optimizer).__name__ if groups else "none"
    lines = ["configuration:", *config, f"units ({len(units)}):", *units, f"optimizer {name}:", *optimizer]
    return "\n".join(lines)


def report_start(engine: "DeepSpeedEngine") -> None:
    """Log one line about ``engine``, and what ``dump_state`` and ``memory_breakdown`` ask for."""
    log_dist(_summary(engine))
    plan = engine.runtime.plan
    away = any(state is not None and state.away for u in engine.runtime.units for state in (u.plan.param, u.plan.optim))
    if away or plan.offload.host_limit or plan.offload.device_limit:
        log_dist(f"{'; '.join(engine.places())}\n{engine.memory_plan().table()}")
    if engine.dump_state():
        log_dist(f"dump_state\n{state_dump(engine)}")
    see_memory_usage("memory after initialize", force=engine.memory_breakdown())


def follow_collectives(cfg: DeepSpeedConfig, mesh: Mesh) -> None:
    """With a ``comms_logger`` block, switch the log of ``deepspeed.comm`` on and enter this mesh's collectives in
    it.
    """
    if "comms_logger" not in cfg.model_fields_set:
        return
    block = cfg.comms_logger
    on = block.enabled or "enabled" not in block.model_fields_set  # a block without the key is a wish for the log
    trace.configure(
        enabled=on, prof_all=block.prof_all, prof_ops=block.prof_ops, verbose=block.verbose, debug=block.debug
    )
    for group in {id(g): g for g in (mesh.job, mesh.zero, mesh.data, *mesh.groups)}.values():
        group.ledger.append(trace.begin)


def _summary(engine: "DeepSpeedEngine") -> str:
    units = engine.runtime.units
    moved = sum(u.movable for u in units)
    numel = sum(s.numel for u in units for s in u.layout.segments)
    return (
        f"DeepSpeed info: version={__version__}, {numel:,} parameters in {len(units)} units ({moved} sharded), "
        f"{engine.mesh.job.size} ranks, {engine._config.compute_dtype}, "
        f"batch {engine.train_batch_size()} = {engine.train_micro_batch_size_per_gpu()} x "
        f"{engine.gradient_accumulation_steps()} x {engine.mesh.divisor}; the engine alone divides by "
        "accumulation steps and ranks"
    )
