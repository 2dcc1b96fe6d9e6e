"""Rules between keys: the batch triangle, what contradicts, and what has no effect beside the others."""

from collections.abc import Iterator

from deepspeed.config.model.blocks import OffloadDeviceEnum, OffloadOptimizerConfig, OffloadParamConfig
from deepspeed.config.model.elastic import share_of
from deepspeed.config.model.keys import Configuration
from deepspeed.config.model.optim_params import NOT_ON_DEVICE, NOT_ON_HOST
from deepspeed.config.model.values import ACCUMULATION, BATCH_KEYS, MICRO, TRAIN, is_auto
from deepspeed.errors import ElasticityConfigError, counted

Rule = tuple[object, str, str]  # (is it broken, the key it is about, the rest of the sentence)
_ZERO = "zero_optimization"


def _share(train: int, factor: int, world_size: int, name: str) -> int:
    """Return ``train / (factor * world_size)``; raise ValueError when it is not a whole number."""
    count = factor * world_size
    if train % count:
        below, above = train // count * count, (train // count + 1) * count
        raise ValueError(
            f"{TRAIN} {train} does not divide evenly over {name} {factor} x {world_size} ranks = {count}. Set {TRAIN} "
            f"to {f'{below} or {above}' if below else above}, or change the number of ranks."
        )
    return train // count


def resolve_batch(cfg: Configuration, *, lenient: bool) -> dict[str, int]:
    """Return all batch sizes: train_batch_size = micro batch per rank x accumulation steps x data-parallel ranks.

    Absent accumulation means 1; "auto" is never guessed. ``lenient`` refuses nothing: what is missing becomes 1.
    Raises LookupError for an "auto" that nobody resolved, ValueError when the triangle does not close.
    """
    train, micro, steps = (getattr(cfg, name) for name in BATCH_KEYS)
    world, autos = cfg.world_size, [key for key in BATCH_KEYS if is_auto(cfg.source.get(key))]
    if cfg.elasticity.enabled:
        return _elastic_batch(cfg, [key for key in BATCH_KEYS if getattr(cfg, key) is not None])
    if lenient:
        micro, steps = micro or 1, steps or 1
        return dict(zip(BATCH_KEYS, (train or micro * steps * world, micro, steps), strict=True))
    if steps is None and ACCUMULATION not in autos and (train is None or micro is None):
        steps = 1
    if [train, micro, steps].count(None) > 1:
        if not autos:
            raise ValueError(f"neither {TRAIN} nor {MICRO} is given. Set at least one of them.")
        raise LookupError(
            f'{" and ".join(autos)} is still "auto" and cannot be derived from the other batch keys. Only an '
            f"integration (Transformers, Accelerate) fills that in; write numbers for two of {', '.join(BATCH_KEYS)}."
        )
    if micro is None:
        micro = _share(train, steps, world, ACCUMULATION)
    elif steps is None:
        steps = _share(train, micro, world, MICRO)
    product = micro * steps * world
    if train not in (None, product):
        fits, rest = divmod(train, micro * steps)
        who = (
            f" {TRAIN} {train} is that of {counted(fits, 'rank')}: whoever filled it in (Accelerate?) counted so many."
        )
        raise ValueError(
            f"Check batch related parameters. {TRAIN} is not equal to micro_batch_per_gpu * gradient_acc_step * "
            f"world_size {train} != {micro} * {steps} * {world} (= {product}). "
            f"Set {TRAIN} to {product}, or delete {ACCUMULATION} and let it be derived.{'' if rest else who}"
        )
    return dict(zip(BATCH_KEYS, (product, micro, steps), strict=True))


def _elastic_batch(cfg: Configuration, given: list[str]) -> dict[str, int]:
    """Return the batch sizes that the elasticity block chooses. Raise ElasticityError (a ValueError)."""
    if given and not cfg.elasticity.ignore_non_elastic_batch_info:
        raise ElasticityConfigError(
            f"{given[0]} is given beside elasticity.enabled, which chooses the batch sizes. Delete "
            f"{' and '.join(given)}, or set elasticity.ignore_non_elastic_batch_info to true."
        )
    train, micro, _ = share_of(cfg.elasticity, cfg.world_size * cfg.ways, mp_size=cfg.ways)
    return dict(zip(BATCH_KEYS, (train, micro, train // (micro * cfg.world_size)), strict=True))


def _precision_rules(cfg: Configuration) -> Iterator[Rule]:
    fp16, autocast, dtype, computed = cfg.fp16, cfg.torch_autocast, cfg.data_types.param_dtype, cfg.compute_dtype
    both = fp16.enabled and cfg.bf16.enabled
    yield both, "fp16.enabled", "and bf16.enabled are both true. Keep one: a model computes in one 16-bit dtype."
    if fp16.enabled and fp16.dynamic:
        for name in ("loss_scale_window", "min_loss_scale", "hysteresis"):
            value = getattr(fp16, name)
            yield value < 1, f"fp16.{name}", f"must be at least 1 with a dynamic loss scale, not {value}."
        first, low = 2**fp16.initial_scale_power, fp16.min_loss_scale
        text = f"{low} is above the first loss scale, which is 2 ** initial_scale_power = {first}."
        yield low > first, "fp16.min_loss_scale", text
    text = f"is {dtype}, but the fp16 and bf16 blocks say {computed}. Delete param_dtype or enable the matching block."
    yield dtype not in (None, computed), "data_types.param_dtype", text
    differs = autocast.enabled and computed != "fp32" and autocast.dtype != computed
    text = f"is {autocast.dtype}, but {computed}.enabled is true. Make them agree, or switch one off."
    yield differs, "torch_autocast.dtype", text


def _reduction_rules(cfg: Configuration) -> Iterator[Rule]:
    zero, factor, op = cfg.zero, cfg.gradient_predivide_factor, cfg.gradient_allreduce_op
    stage = f"{_ZERO}.stage {zero.stage}"
    scatters = zero.reduce_scatter and (zero.stage == 3 or (zero.stage == 2 and op == "mean"))
    text = f"cannot be combined with {stage} and reduce_scatter. Set it to false."
    yield scatters and cfg.prescale_gradients, "prescale_gradients", text
    text = f"must be 1.0, not {factor}, with {stage} and reduce_scatter."
    yield scatters and factor != 1.0, "gradient_predivide_factor", text
    text = f'"sum" cannot be combined with {stage}. Use "mean" and scale the loss.'
    yield op == "sum" and zero.stage == 3, "gradient_allreduce_op", text
    text = f'"{cfg.normalize}" cannot be combined with gradient_allreduce_op "sum".'
    yield cfg.normalize != "micro_batches" and op == "sum", "normalize", text
    text = f"false allows {_ZERO}.overlap_comm only from stage 2 on. Set overlap_comm to false."
    unmanaged = not cfg.managed_gradient_accumulation
    yield unmanaged and zero.overlap_comm and zero.stage < 2, "managed_gradient_accumulation", text
    if not zero.compute_grad_norm:
        path = f"{_ZERO}.compute_grad_norm"
        yield zero.stage not in (1, 2), path, f"false needs stage 1 or 2, not {zero.stage}."
        text = "false needs gradient_clipping 0 (it is 1.0 when absent): clipping uses the norm."
        yield cfg.gradient_clipping > 0, path, text
        yield zero.offload_optimizer is not None, path, "false cannot be combined with offload_optimizer."


def _offload_rules(cfg: Configuration) -> Iterator[Rule]:
    zero = cfg.zero
    optimizer, param, stage = zero.offload_optimizer, zero.offload_param, zero.stage
    for name, block in (("offload_optimizer", optimizer), ("offload_param", param)):
        homeless = block is not None and block.device is OffloadDeviceEnum.nvme and not block.nvme_path
        homeless &= name == "offload_optimizer" or stage == 3
        yield homeless, f"{_ZERO}.{name}.device", f'"nvme" needs {name}.nvme_path, a folder on the drive.'
    asked, head = optimizer or OffloadOptimizerConfig(), f"{_ZERO}.offload_optimizer"
    shared, travels = asked.ratio < 1.0, asked.device_states == "travel"
    delayed, early, on_drive = asked.delayed_update, asked.super_offload, asked.device is OffloadDeviceEnum.nvme
    text = 'below 1.0 needs stage 3, or device_states "travel".'
    yield shared and stage != 3 and not travels, f"{head}.ratio", text
    path = f"{head}.device_states"
    yield travels and on_drive, path, '"travel" needs offload_optimizer.device "cpu": states on a drive do not travel.'
    text = '"travel" cannot be combined with offload_param: what the device updates is written where parameters rest.'
    yield travels and param is not None, path, text
    path, beside = f"{head}.delayed_update", f"{head}.super_offload"
    text = 'needs offload_optimizer.device "cpu": an update on a drive does not begin beside the backward.'
    yield early and on_drive, beside, text
    text = "cannot be combined with an update that is delayed, or that the device shares (ratio)."
    yield early and (delayed or shared or travels), beside, text
    yield delayed and on_drive, path, 'needs offload_optimizer.device "cpu": an update on a drive is not delayed.'
    yield delayed and (shared or travels), path, "cannot be combined with an update that the device shares (ratio)."
    text = f"needs stage 3; the stage is {stage}."
    yield zero.pipeline_loading_checkpoint and stage != 3, f"{_ZERO}.pipeline_loading_checkpoint", text
    if cfg.optimizer is not None:
        absent = (NOT_ON_DEVICE if optimizer is None else NOT_ON_HOST).get(cfg.optimizer.type.lower(), ())
        how = "without" if optimizer is None else "with"
        text = f"is not a setting of {cfg.optimizer.type} {how} {head}."
        for name in absent:
            yield name in cfg.optimizer.params, f"optimizer.params.{name}", text


def _zenflow_rules(cfg: Configuration) -> Iterator[Rule]:
    zero, block, head = cfg.zero, cfg.zero.zenflow, f"{_ZERO}.zenflow"
    if block is None:
        return
    optimizer, param = zero.offload_optimizer or OffloadOptimizerConfig(), zero.offload_param
    whole, on_host = isinstance(block.select_interval, int), optimizer.device is OffloadDeviceEnum.cpu
    yield not on_host, head, 'needs offload_optimizer.device "cpu": the host updates what is not chosen.'
    text = "cannot be combined with offload_param: the device writes the columns it updates where parameters rest."
    yield param is not None and zero.stage == 3, head, text
    shared = optimizer.ratio < 1.0 or optimizer.device_states == "travel"
    text = "cannot be combined with offload_optimizer.delayed_update, super_offload, ratio below 1 or device_states."
    yield shared or optimizer.delayed_update or optimizer.super_offload, head, text
    yield cfg.gradient_allreduce_op == "sum", head, 'cannot be combined with gradient_allreduce_op "sum". Use "mean".'
    text = "cannot be combined with tensor_parallel: ranks have parts of columns."
    yield cfg.tensor_parallel.autotp_size > 1, head, text
    path, auto = f"{head}.select_interval", block.select_strategy == "auto"
    yield auto and whole, path, 'is a number, so select_strategy must be "step" or "epoch", not "auto".'
    yield not auto and not whole, path, f'must be a number with select_strategy "{block.select_strategy}".'
    text = 'is needed by select_strategy "epoch". Set it to the updates of an epoch, or use "step".'
    yield block.select_strategy == "epoch" and block.steps_per_epoch is None, f"{head}.steps_per_epoch", text
    if isinstance(block.select_interval, int) and isinstance(block.update_interval, int):
        steps = block.select_interval * (block.steps_per_epoch or 1 if block.select_strategy == "epoch" else 1)
        text = f"of {steps} steps must not be below update_interval {block.update_interval}."
        yield steps < block.update_interval, path, text


def _group_rules(cfg: Configuration) -> Iterator[Rule]:
    world, mics, hpz = cfg.world_size, cfg.zero.mics_shard_size, cfg.zero.zero_hpz_partition_size
    for name, size in (("mics_shard_size", mics), ("zero_hpz_partition_size", hpz)):
        text = f"{size} does not divide the {world} data-parallel ranks. Use a divisor of {world}."
        yield size > 1 and world % size, f"{_ZERO}.{name}", text
    text = f"{mics} and zero_hpz_partition_size {hpz} both choose the shard group. Keep one."
    yield mics > 0 and hpz > 1 and mics != hpz, f"{_ZERO}.mics_shard_size", text
    data = cfg.data_parallel_size
    text = f"{data} is not the number of ranks that get different batches, {world}. Delete it, or set it to {world}."
    yield cfg.sequence_ways > 1 and data not in (None, world), "data_parallel_size", text


def _parallel_rules(cfg: Configuration) -> Iterator[Rule]:
    block = cfg.tensor_parallel
    size, inner = block.autotp_size, block.tensor_parallel.tp_size
    text = f"is {inner}, but tensor_parallel.autotp_size is {size}. Delete tp_size, or make them equal."
    yield size > 1 and inner not in (1, size), "tensor_parallel.tensor_parallel.tp_size", text
    ways, ranks = cfg.expert_parallel.ways, cfg.world_size * cfg.ways
    text = f"x expert_tensor_parallel_size = {ways} does not divide the {ranks} ranks. Use a divisor of {ranks}."
    yield ranks % ways, "expert_parallel.autoep_size", text
    passes, on = cfg.compile.passes or (), cfg.compile.deepcompile
    text = f'{[*passes]} with deepcompile {on}: use "autosp" alone, or neither: engine.compile() does without.'
    yield passes != ("autosp",) and (on or "autosp" in passes), "compile.passes", text
    text = "cannot be combined with expert_parallel in this release: experts need whole tokens. Delete it."
    yield ways > 1 and block.sequence_parallel_norms, "tensor_parallel.sequence_parallel_norms", text
    text = '"auto" chooses what goes to the host, which offload_activations: true does too. Delete one of them.'
    yield cfg.sequence.plan == "auto" and cfg.sequence.offload_activations, "sequence.plan", text


def rule_violations(cfg: Configuration, *, lenient: bool) -> list[tuple[str, str]]:
    """Return (path, sentence) of every rule between keys that ``cfg`` breaks; ``lenient``: no rules about ranks."""
    kinds = (_precision_rules, _reduction_rules, _offload_rules, _zenflow_rules, _parallel_rules)
    kinds = (*kinds, *(() if lenient else (_group_rules,)))
    return [(path, f"{path} {rest}") for rules in kinds for broken, path, rest in rules(cfg) if broken]


# Read only where parameters are sharded over the ranks.
_PARAMETERS_SHARDED = (
    *("allgather_sequential", "gather_16bit_weights_on_model_save", "leaf_module.classes", "leaf_module.names"),
    *("leaf_module.name_suffixes", "max_live_parameters", "max_reuse_distance", "mics_shard_size"),
    *("model_persistence_threshold", "param_persistence_threshold", "prefetch_bucket_size", "zero_hpz_partition_size"),
    "separate_reduce_group",
)
_DYNAMIC_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


def inert_under(cfg: Configuration) -> dict[str, str]:
    """Return canonical path -> reason for every key that other keys of ``cfg``, switches aside, make ineffective."""
    why: dict[str, str] = {}
    if cfg.zero.stage != 3:
        text = f"stage {cfg.zero.stage} does not shard parameters"
        why |= {f"{_ZERO}.{name}": text for name in _PARAMETERS_SHARDED}
        why |= {f"{_ZERO}.offload_param.{name}": text for name in OffloadParamConfig.model_fields}
    if not cfg.fp16.dynamic:
        why |= {f"fp16.{name}": "fp16.loss_scale is a fixed number" for name in _DYNAMIC_SCALE}
    if cfg.compute_dtype == "fp32":
        why["data_types.keep_in_fp32_modules"] = "nothing is cast: neither fp16 nor bf16 is enabled"
    if cfg.gradient_allreduce_op == "sum":
        why |= dict.fromkeys(("prescale_gradients", "gradient_predivide_factor"), 'gradient_allreduce_op is "sum"')
    elif cfg.prescale_gradients:
        why["gradient_predivide_factor"] = "prescale_gradients divides by all ranks at once"
    if cfg.sequence_ways == 1:
        names = ("data_parallel_size", "seq_parallel_communication_data_type", "sequence.attention")
        why |= dict.fromkeys(names, "sequence_parallel_size is 1")
    else:
        why["communication_data_type"] = "seq_parallel_communication_data_type takes its place"
    if cfg.hybrid_engine.inference_tp_size > 1 and cfg.tensor_parallel.ways == 1:
        why["hybrid_engine.tp_gather_partition_size"] = "inference_tp_size lets no layer be gathered"
    return why
