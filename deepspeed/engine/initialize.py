"""The composition root: ``initialize`` puts config, mesh, optimizer, ZeRO and engine together."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from pydoc import ErrorDuringImport, locate
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import Dataset

from deepspeed.accelerator.device import DTYPES, device_for, get_accelerator, take_device
from deepspeed.client.comm import comms_log
from deepspeed.client.comm.groups import hold_registered
from deepspeed.client.hybrid_engine import DeepSpeedHybridEngine, check_generates
from deepspeed.client.lr_schedules import build_scheduler
from deepspeed.client.mpu import Ways, ways_of_mesh, ways_of_mpu
from deepspeed.client.zero.init import restore_init_context, shutdown_init_context
from deepspeed.client.zero.leaf import set_z3_leaf_modules, set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix
from deepspeed.client.zero.optimizer import hold_clipping
from deepspeed.comm.collectives import failures, gather_objects
from deepspeed.comm.hang.watch import follow, watched
from deepspeed.comm.init import init_distributed
from deepspeed.comm.mesh.groups import Mesh, build_mesh, plain_mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.model.settings import inert_notes
from deepspeed.engine import DeepSpeedEngine
from deepspeed.engine.checks import check_same_config
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError, OptimizerConfigError, UsageError
from deepspeed.moe.spread import facts_with_experts, spread_experts
from deepspeed.monitor.log import log_dist
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.monitor.process_settings import hold_settings
from deepspeed.optim.base import GroupStep, slot_bytes
from deepspeed.optim.muon import mark_muon_parameters
from deepspeed.optim.registry import build_optimizer, granularity
from deepspeed.pipe.engine import DualPipeVEngine, PipelineEngine, follow_config
from deepspeed.pipe.module import DualPipeVModule, PipelineModule
from deepspeed.profiling.start_report import report_start
from deepspeed.profiling.timeline.observer import observe
from deepspeed.sequence.tiling.blocks import plan_blocks
from deepspeed.sequence.tiling.memory import save_memory
from deepspeed.sequence.wire import wire_sequences
from deepspeed.tensor.start import configured, split
from deepspeed.zero.build import BuildRules, build
from deepspeed.zero.layout import Granularity
from deepspeed.zero.optim_view import check_fresh
from deepspeed.zero.param import castable, is_composed
from deepspeed.zero.partition import UnitFacts, is_read, is_shared, statistics_dtypes
from deepspeed.zero.plan import ZeroPlan, make_plan
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.update.registry import settings_of

ConfigLike = dict[str, Any] | str | os.PathLike[str]
OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigLike | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: ConfigLike | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Wrap ``model`` for training or, without an optimizer, for inference. Collective over all ranks.

    Returns (engine, optimizer, loader or None, schedule or None). Raises DeepSpeedConfigError, a ValueError, UsageError
    for wrong arguments, DivergenceError for different models or configurations; nothing of the model has changed.

    Args:
        args: A namespace or dict; ``deepspeed_config`` and ``local_rank`` of it count.
        model: The module, whole or built under ``zero.Init``.
        optimizer: A torch optimizer, a function of the parameters, or None for the configuration's.
        model_parameters: Parameters, or groups of them, to be trained; None: all that require a gradient.
        training_data: A dataset, for which a loader of this rank is made, with ``collate_fn``.
        lr_scheduler: An object, a function of the optimizer, or None for the configuration's.
        mpu: An object whose process groups cut the ranks, as Megatron's; or ``mesh_param``, (data, sequence) sizes.
        dist_init_required: False: there is a process group; else ranks meet at MASTER_PORT, or ``distributed_port``.
        config: A dict, a path (comments allowed) or base64 of the JSON; ``config_params`` is its older name.
    """
    suspended = shutdown_init_context()
    lasting = ExitStack()  # what lasts as long as the engine, which closes it
    engine: DeepSpeedEngine | None = None
    try:
        local_rank = _start_distributed(args, distributed_port, dist_init_required)
        if not isinstance(model, nn.Module):
            raise UsageError(f"deepspeed.initialize needs model=<nn.Module>, got {type(model).__name__}")
        source = _config_source(args, config, config_params)
        if mpu is not None:
            lasting.callback(hold_registered("mpu", mpu).give_back)
        dims = _ways(model, mpu, mesh_param)
        engine = _assemble(model, source, lasting, dims=dims, optimizer=optimizer, parameters=model_parameters)
        engine.local_rank, engine.collate_fn = local_rank, collate_fn
        engine.mpu = engine.mpu if mpu is None else mpu
        engine.lr_scheduler = _choose_scheduler(engine, lr_scheduler)
        if training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(training_data)
        observe(engine)
    except BaseException:
        if engine is not None:
            engine.destroy()
        lasting.close()
        raise
    finally:
        restore_init_context(suspended)
    follow(engine)
    report_start(engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _from_args(args: Any, name: str) -> Any:
    """Return ``name`` of the client's arguments, which are a dict or a namespace; None where it is not there."""
    return args.get(name) if isinstance(args, dict) else getattr(args, name, None)


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    config = config_params if config is None else config
    given = next((s for n in ("deepspeed_config", "deepscale_config") if (s := _from_args(args, n)) is not None), None)
    if (config is None) is (given is None):
        raise UsageError(
            f"{'no configuration was given' if given is None else 'two configurations were given'}: pass config= to "
            "deepspeed.initialize, or start the script with --deepspeed_config FILE (args.deepspeed_config)"
        )
    return given if config is None else config


def _start_distributed(args: Any, port: int, required: bool | None) -> int:
    init_distributed(distributed_port=port, dist_init_required=required, verbose=False)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    stated = _from_args(args, "local_rank")
    if stated is not None and stated >= 0 and stated != local_rank:
        raise UsageError(f"args.local_rank is {stated} but LOCAL_RANK is {local_rank}; drop one, or make them equal")
    chosen = _from_args(args, "device_rank")
    if chosen is None:
        take_device(local_rank)
        return local_rank
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(device_for(int(chosen)).index)
    return int(chosen)


def _ways(model: nn.Module, mpu: Any, mesh_param: Any) -> Ways:
    """Return how many ways the ranks are cut besides data parallelism."""
    if isinstance(model, PipelineModule):
        if mpu is not None or mesh_param is not None:
            raise UsageError("a PipelineModule says how the ranks are cut: pass neither mpu nor mesh_param")
        return Ways(pp=model.num_stages, tp=max(1, model.topology().get_dim("model")))
    if mpu is None:
        return ways_of_mesh(mesh_param)
    if mesh_param is not None:
        raise UsageError("mpu and mesh_param both say how the ranks are cut; pass one of them")
    return ways_of_mpu(mpu, get_accelerator().communication_backend_name())


def _log_notes(cfg: DeepSpeedConfig) -> None:
    if notes := inert_notes(cfg):
        asked = cfg.zero.offload_param is not None and cfg.zero_stage != 3
        level = logging.WARNING if asked else logging.INFO
        listed = "; ".join(notes)
        if len(notes) > 2:
            listed = f"{', '.join(note.partition(' (')[0] for note in notes)} (ds_config check says why)"
        log_dist(f"configuration keys without effect here: {listed}", level=level)
    if (size := cfg.vocabulary_size) is not None and size % 8:
        text = f"vocabulary_size {size} is no multiple of 8; matrix units are faster with {-(-size // 8) * 8}"
        log_dist(f"{text} (pad the embedding)", level=logging.WARNING)


def _assemble(
    model: nn.Module, source: Any, lasting: ExitStack, *, dims: Ways, optimizer: OptimizerLike | None, parameters: Any
) -> DeepSpeedEngine:
    backend = get_accelerator().communication_backend_name()
    job = plain_mesh(backend, group=dims.group).job
    cfg, dims = configured(model, source, dims, job.size // dims.shared)
    check_same_config(cfg, job)
    hold_settings(lasting, log_level=cfg.log_level, no_collection=cfg.disable_python_gc)
    lasting.callback(hold_clipping().give_back)
    monitor = MonitorMaster(cfg, first=job.index == 0)
    monitor.enabled = gather_objects(monitor.enabled, job)[0]  # the first rank writes, some of it of all ranks
    lasting.callback(monitor.close)
    _log_notes(cfg)
    if isinstance(model, PipelineModule):
        follow_config(model, cfg, fixed=parameters is not None or isinstance(optimizer, torch.optim.Optimizer))
    elif "schedule" in cfg.pipeline.model_fields_set or "chunks_per_stage" in cfg.pipeline.model_fields_set:
        log_dist(f"the block 'pipeline' is for a PipelineModule; {type(model).__name__} is none and runs as a whole")
    _check_model(model)
    check_generates(model, cfg, ranks=job.size, axes=dims)
    base = _optimizer(cfg, model, optimizer, parameters)
    plan = make_plan(cfg, job.size // (dims.pp * dims.tp), settings_of(cfg))
    lasting.enter_context(watched(cfg.hang_timeout))
    mesh = _mesh(backend, cfg, plan, dims)
    lasting.callback(hold_registered("topology", mesh.topology if dims.shared > 1 else None).give_back)
    split(model, cfg, mesh, base, lasting)
    mesh = wire_sequences(model, cfg, mesh, dims, lasting)
    save_memory(model, cfg.sequence, shared=mesh.tp.size > 1, back=lasting)
    plan_blocks(model, cfg, mesh, lasting)
    mesh, of_experts, loads = spread_experts(model, cfg, mesh, lasting, base)
    _log_collectives(cfg, mesh)
    device = get_accelerator().torch_device()
    rules = _build_rules(cfg, model, base, device)
    _mark_leaves(model, cfg)
    order = names_by_group(model, base.param_groups if base is not None else [])
    if base is not None:
        lasting.callback(_give_back, base, [{"params": [*group["params"]]} for group in base.param_groups])
        check_fresh(base)
        plan = _shared_update(plan, base, mesh, device)
    facts, facts_of = _facts(cfg, mesh, (mesh.zero if dims.registered or mesh.cuts else mesh.data).size), None
    if isinstance(model, PipelineModule):
        mesh, facts_of = model.join(mesh, facts)
        facts = replace(facts, mesh=mesh)
    facts_of = facts_with_experts(facts, facts_of, of_experts)
    parts = build(model, plan, facts, rules=rules, optimizer=base, facts_of=facts_of)
    if isinstance(base, GroupStep):
        base.load_kernels()
    kind: type[DeepSpeedEngine] = DeepSpeedHybridEngine if cfg.hybrid_engine.enabled else DeepSpeedEngine
    kind = PipelineEngine if isinstance(model, PipelineModule) else kind
    kind = DualPipeVEngine if isinstance(model, DualPipeVModule) else kind
    engine = kind(model, cfg, mesh=mesh, parts=parts, optimizer=base, monitor=monitor, lasting=lasting)
    engine._checkpoints.group_names = order
    loads.follow(engine)
    return engine


def _give_back(optimizer: torch.optim.Optimizer, given: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, given, strict=False):
        group.update(values)


def _optimizer(
    cfg: DeepSpeedConfig, model: nn.Module, optimizer: OptimizerLike | None, parameters: Any
) -> torch.optim.Optimizer | None:
    """Choose this rank's optimizer. In a pipeline, whose stages have different parameters, all raise if one fails."""
    base, fault = None, None
    try:
        base = choose_optimizer(cfg, model, optimizer, parameters)
    except Exception as error:
        fault = error
        if not isinstance(model, PipelineModule):
            raise
    if isinstance(model, PipelineModule):
        faults = failures(fault, plain_mesh("gloo").job)
        if texts := [f"{model.title(rank)}: {text}" for rank, text in faults.items()]:
            kind = type(fault) if isinstance(fault, DeepSpeedError) else OptimizerConfigError
            raise kind("; ".join(texts[:3])) from fault
    return base


def _mesh(backend: str, cfg: DeepSpeedConfig, plan: ZeroPlan, dims: Ways) -> Mesh:
    control = plan.divergence != "assume_none"
    cut = {name: way for name, way in vars(dims).items() if name != "registered"}
    return build_mesh(backend, inner_size=plan.inner_size, control=control, reducing=plan.reducing, **cut)


def _log_collectives(cfg: DeepSpeedConfig, mesh: Mesh) -> None:
    comms_log.configure(cfg)
    if "comms_logger" in cfg.model_fields_set:
        groups = (mesh.job, mesh.zero, mesh.data, *mesh.groups, *mesh.sums, *mesh.experts)
        for axis in {id(group): group for group in groups}.values():
            axis.ledger.append(comms_log.begin)


def _shared_update(plan: ZeroPlan, base: torch.optim.Optimizer, mesh: Mesh, device: torch.device) -> ZeroPlan:
    """Return ``plan`` with the share of the update that is the device's, which may have to be measured. Collective."""
    offload, name = plan.offload, type(base).__name__
    offload.update.check(base, mesh)
    share = offload.update.device_share(offload.device_share, base, mesh, device)
    if share != 0 and getattr(base, "host_only", False) and device.type != "cpu":
        raise OptimizerConfigError(
            "zero_optimization.offload_optimizer.ratio leaves a share of the update on the device, which "
            f"{name} cannot do; set ratio to 1, or use the Fused class of the same name"
        )
    return replace(plan, offload=replace(offload, device_share=share))


def _mark_leaves(model: nn.Module, cfg: DeepSpeedConfig) -> None:
    """Mark the modules that ``zero_optimization.leaf_module`` names: they are gathered whole."""
    if "leaf_module" in cfg.zero.model_fields_set:
        leaf = cfg.zero.leaf_module
        set_z3_leaf_modules(model, list(leaf.classes), raise_if_not_found=False)
        set_z3_leaf_modules_by_name(model, list(leaf.names), raise_if_not_found=False)
        set_z3_leaf_modules_by_suffix(model, list(leaf.name_suffixes), raise_if_not_found=False)


def names_by_group(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    """Return the parameters' names of each optimizer group, in the caller's order, which files of DeepSpeed go by."""
    names = {p: n for n, p in model.named_parameters()}
    return [[names[p] for p in group["params"]] for group in groups]


def _check_model(model: nn.Module) -> None:
    params = set(model.parameters())
    if not params:
        raise UsageError(f"{type(model).__name__} has no parameters, so there is nothing to train or to shard")
    for name, param in model.named_parameters():
        if fault := _fault(param, params):
            raise UsageError(f"parameter {name!r} {fault}")


def _fault(param: nn.Parameter, params: set[nn.Parameter]) -> str | None:
    """Return why ``param`` cannot belong to a new engine over ``params``; None if it can."""
    if isinstance(param, UninitializedParameter):
        return "of a lazy module has no shape yet; run one forward of the model before deepspeed.initialize"
    if is_composed(param) and param.requires_grad:
        return (
            f"is a {type(param).__name__}, made of other tensors, which cannot be trained here. Let it require no "
            "gradient (param.requires_grad_(False)) and train an adapter, or build the model of ordinary tensors"
        )
    if param.is_complex() and param.requires_grad:
        return (
            f"is complex ({param.dtype}), which the sharded optimizer cannot hold; keep it as a real tensor with a "
            "last dimension of 2 and use torch.view_as_complex(param) in forward"
        )
    if param.is_floating_point() and not castable(param.dtype) and param.requires_grad:
        return (
            f"is {param.dtype}: codes without their scales, which cannot be trained. Let it require no gradient "
            "(param.requires_grad_(False)), or build the model in bfloat16 or float32"
        )
    unit: Any = getattr(param, "_ds_unit", None)
    keeper = getattr(unit, "keeper", None)
    previous = keeper.client() if isinstance(keeper, Runtime) else None
    # Clients evaluate with one engine and then train the same module with another, without destroying the first.
    if previous is None or previous._give_way(params):
        if not (param.requires_grad and is_read(param)):
            return None
    elif is_shared(param) and not unit.movable and not unit.trainable and unit.mesh.tp.size == 1:
        return None
    return (
        "already belongs to a living engine, and engines share only what is frozen in both and whole on every rank "
        "(stages 0 to 2); call engine.destroy() on that one first, give this engine its own copy of the module, or let "
        "one engine hold both models"
    )


def choose_optimizer(
    cfg: DeepSpeedConfig, model: nn.Module, client: OptimizerLike | None, model_parameters: Any
) -> torch.optim.Optimizer | None:
    """Return the client's optimizer (an object, or a function of the parameters), else the configured one, if any."""
    given = [p for p in model.parameters() if p.requires_grad] if model_parameters is None else model_parameters
    parameters = _trained(given)
    base: torch.optim.Optimizer | None = None
    _tell_of_two("optimizer", client, cfg.optimizer)
    if isinstance(client, torch.optim.Optimizer):
        base = client
    elif callable(client):
        base = client(parameters)
        if not isinstance(base, torch.optim.Optimizer):
            raise OptimizerConfigError(
                f"optimizer= was called with the parameters and has to return a torch optimizer; it returned {base!r}"
            )
    elif cfg.optimizer is not None:
        mark_muon_parameters(model.named_parameters())
        block = cfg.zero.offload_optimizer
        # With a share on the device the class must know both places.
        host = block is not None and block.ratio == 1.0 and block.device_states == "rest"
        base = build_optimizer(cfg.optimizer.type, cfg.optimizer.params, parameters=parameters, offload=host)
    elif cfg.zero_stage in (1, 2):
        raise OptimizerConfigError(
            f"zero stage {cfg.zero_stage} requires an optimizer: pass optimizer= or add an 'optimizer' block to the "
            "configuration"
        )
    params = set(model.parameters())
    for index, group in enumerate(base.param_groups if base is not None else ()):
        for position, param in enumerate(group["params"]):
            if param not in params:
                raise OptimizerConfigError(
                    f"the optimizer's parameter group {index} holds a tensor (number {position}, shape "
                    f"{tuple(param.shape)}) that is no parameter of the model {type(model).__name__}; build the "
                    "optimizer from this model's parameters()"
                )
    return base


def _tell_of_two(name: str, client: Any, block: Any) -> None:
    """Warn where the client's ``name`` takes the place of the configuration's."""
    if client is not None and block is not None:
        text = f"the configuration's block {name!r} ({block.type}) is ignored, as deepspeed.initialize got another"
        log_dist(f"{text}; delete one of the two", level=logging.WARNING)


def _trained(given: Iterable[Any]) -> list[Any]:
    """Drop from ``given`` (parameters, or groups of them) what requires no gradient, and groups of nothing else."""
    kept: list[Any] = []
    for item in given:
        if isinstance(item, dict):
            some = item.get("params", ())
            params = _trained([some] if isinstance(some, torch.Tensor) else some)
            kept += [{**item, "params": params}] if params else []
        elif getattr(item[1] if isinstance(item, tuple) else item, "requires_grad", True):  # (name, parameter)
            kept.append(item)
    return kept


def _build_rules(
    cfg: DeepSpeedConfig, model: nn.Module, base: torch.optim.Optimizer | None, device: torch.device
) -> BuildRules:
    dtypes = cfg.dtype_policy
    keep = cfg.data_types.keep_in_fp32_modules
    if keep == "auto":
        names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        if cfg.compute_dtype == "fp16":
            names = (*names, *(getattr(model, "_keep_in_fp32_modules", None) or ()))
        keep = tuple(names)
    whole = base is not None and granularity(base) == "parameter"
    return BuildRules(
        device=device,
        compute_dtype=DTYPES[dtypes.compute] if dtypes.compute else None,
        keep_fp32=tuple(keep),
        granularity=Granularity.PARAMETER if whole else Granularity.ELEMENT,
        keep_master=base is not None,
        buffer_dtype=DTYPES[dtypes.buffers] if dtypes.buffers else None,
        beside=statistics_dtypes(model),
        low=_low_precision(cfg, model),
        low_dtype=DTYPES[dtypes.low],
        slot_bytes=slot_bytes(base) if base is not None else 0,
        accum_dtype=DTYPES[dtypes.accumulation],
        window=cfg.gradient_accumulation_steps > 1 or not cfg.managed_gradient_accumulation,
    )


def _low_precision(cfg: DeepSpeedConfig, model: nn.Module) -> frozenset[nn.Parameter]:
    """Return parameters of the module classes in ``lower_precision_safe_modules``: autocast reads them in its dtype."""
    names = cfg.torch_autocast.lower_precision_safe_modules if cfg.torch_autocast.enabled else None
    classes = []
    for path in names or ():
        named, why = None, "it is no class"
        try:
            named = locate(path)
        except ErrorDuringImport as error:
            why = f"importing it failed: {error}"
        if not isinstance(named, type):
            raise DeepSpeedConfigError(
                f"torch_autocast.lower_precision_safe_modules: {path!r}: {why}; write it like torch.nn.Linear"
            )
        classes.append(named)
    owners = (module for module in model.modules() if isinstance(module, tuple(classes)))
    return frozenset(p for module in owners for p in module.parameters(recurse=False))


def _facts(cfg: DeepSpeedConfig, mesh: Mesh, losses: int) -> UnitFacts:
    """Return what units share: the mean over ``losses`` is taken once, split between packing and the step by the
    predivide factor. With the operation "sum" each batch counts once, however many ranks share it.
    """
    mean = cfg.gradient_allreduce_op == "mean"
    total = early = float(losses if mean else mesh.sp.size if mesh.cuts else 1)
    if mean and cfg.prescale_gradients is False and cfg.gradient_predivide_factor != 1.0:
        early = cfg.gradient_predivide_factor
    wire = cfg.dtype_policy.reduction
    return UnitFacts(mesh, total, early, DTYPES[wire] if wire else None, sanity_checks=cfg.zero.enable_sanity_checks)


def _choose_scheduler(engine: DeepSpeedEngine, client: Any) -> Any:
    base, block = engine.basic_optimizer, engine._config.scheduler
    if base is None:
        return None
    _tell_of_two("scheduler", client, block)
    if client is not None:
        makes = callable(client) and (isinstance(client, type) or not hasattr(client, "step"))
        return client(base) if makes else client
    if block is None:
        return None
    # A client's optimizer may go to another engine, whose schedule takes these for its own.
    given = [{n: deepcopy(v) for n, v in g.items() if n in ("lr", "betas", "momentum")} for g in base.param_groups]
    engine._lasting.callback(_give_back, base, given)
    return build_scheduler(block.type, block.params, base)
