"""Rules between keys. Each function returns what is wrong, as sentences; an empty list means the combination makes
sense.

What contradicts is wrong; what merely has no effect under the chosen stage or optimizer is named by ``inert_under``.
"""

from typing import TYPE_CHECKING

from deepspeed.config.model.optim_params import accepts
from deepspeed.config.model.values import Violation
from deepspeed.config.model.zero import OffloadDeviceEnum, ZenFlowConfig, ZeroConfig

if TYPE_CHECKING:
    from deepspeed.config.model.root import DeepSpeedConfig

Found = list[Violation]


class _Sentences(Found):
    """Collects violations; a sentence begins with the path it is about."""

    def say(self, path: str, rest: str) -> None:
        self.append(Violation(path, f"{path} {rest}"))


def _scale_rules(cfg: "DeepSpeedConfig") -> Found:
    out, fp16 = _Sentences(), cfg.fp16
    if not fp16.enabled or not fp16.dynamic:
        return out
    for key in ("loss_scale_window", "min_loss_scale", "hysteresis"):
        if getattr(fp16, key) < 1:
            out.say(f"fp16.{key}", f"must be at least 1 with a dynamic loss scale, not {getattr(fp16, key)}.")
    first = 2**fp16.initial_scale_power
    if fp16.min_loss_scale > first:
        out.say(
            "fp16.min_loss_scale",
            f"{fp16.min_loss_scale} is above the first loss scale, which is 2 ** initial_scale_power = {first}.",
        )
    return out


def _precision_rules(cfg: "DeepSpeedConfig") -> Found:
    out = _Sentences(_scale_rules(cfg))
    fp16, bf16, zero = cfg.fp16, cfg.bf16, cfg.zero
    host_optimizer = zero.offload_optimizer is not None and zero.offload_optimizer.device is OffloadDeviceEnum.cpu
    if fp16.enabled and bf16.enabled:
        out.say("fp16.enabled", "and bf16.enabled are both true. Keep one: a model computes in one 16-bit dtype.")
    for path, wanted, alone in (
        ("fp16.fp16_master_weights_and_grads", fp16.fp16_master_weights_and_grads, True),
        ("bf16.bf16_master_weights_and_grads", bf16.bf16_master_weights_and_grads, not bf16.bf16_optimizer_states),
    ):
        if wanted and zero.stage == 0:
            out.say(path, "needs zero_optimization.stage 1, 2 or 3.")
        elif wanted and alone and not host_optimizer:
            out.say(path, 'needs zero_optimization.offload_optimizer.device "cpu".')
    if bf16.bf16_optimizer_states and not (bf16.bf16_master_weights_and_grads and zero.stage > 0):
        out.say(
            "bf16.bf16_optimizer_states",
            "needs bf16.bf16_master_weights_and_grads and zero_optimization.stage 1, 2 or 3.",
        )
    dtype, computed = cfg.data_types.param_dtype, cfg.compute_dtype
    if dtype not in (None, computed):
        said = (
            f"is {dtype}, but the fp16 and bf16 blocks say {computed}. Delete param_dtype or enable the matching block."
        )
        out.say("data_types.param_dtype", said)
    autocast = cfg.torch_autocast
    if autocast.enabled and zero.zero_quantized_weights:
        out.say(
            "torch_autocast.enabled", "and zero_optimization.zero_quantized_weights exclude each other. Switch one off."
        )
    if autocast.enabled and computed != "fp32" and autocast.dtype != computed:
        out.say(
            "torch_autocast.dtype",
            f"is {autocast.dtype}, but {computed}.enabled is true. Make them agree, or switch one off.",
        )
    return out


def _reduction_rules(cfg: "DeepSpeedConfig") -> Found:
    out, zero = _Sentences(), cfg.zero
    scatters = zero.reduce_scatter and (zero.stage == 3 or (zero.stage == 2 and cfg.gradient_allreduce_op == "mean"))
    if scatters and cfg.prescale_gradients:
        remedy = "Set it to false."
        out.say(
            "prescale_gradients",
            f"cannot be combined with zero_optimization.stage {zero.stage} and reduce_scatter. {remedy}",
        )
    if scatters and cfg.gradient_predivide_factor != 1.0:
        said = (
            f"must be 1.0, not {cfg.gradient_predivide_factor}, with zero_optimization.stage {zero.stage} and "
            "reduce_scatter."
        )
        out.say("gradient_predivide_factor", said)
    if cfg.gradient_allreduce_op == "sum" and (zero.stage == 3 or zero.zenflow is not None):
        where = "zero_optimization.stage 3" if zero.stage == 3 else "zero_optimization.zenflow"
        out.say("gradient_allreduce_op", f'"sum" cannot be combined with {where}. Use "mean" and scale the loss.')
    if zero.zero_quantized_gradients and not zero.reduce_scatter:
        out.say("zero_optimization.zero_quantized_gradients", "needs zero_optimization.reduce_scatter true.")
    if not cfg.managed_gradient_accumulation and zero.overlap_comm and zero.stage < 2:
        said = "false allows zero_optimization.overlap_comm only from stage 2 on. Set overlap_comm to false."
        out.say("managed_gradient_accumulation", said)
    return _Sentences(out + _norm_rules(cfg))


def _norm_rules(cfg: "DeepSpeedConfig") -> Found:
    out, zero, path = _Sentences(), cfg.zero, "zero_optimization.compute_grad_norm"
    if zero.compute_grad_norm:
        return out
    if zero.stage not in (1, 2):
        out.say(path, f"false needs stage 1 or 2, not {zero.stage}.")
    if cfg.gradient_clipping > 0:
        out.say(path, "false needs gradient_clipping 0 (it is 1.0 when absent): clipping uses the norm.")
    if zero.offload_optimizer is not None or zero.zenflow is not None:
        out.say(path, "false cannot be combined with offload_optimizer or zenflow.")
    return out


def _offload_rules(zero: ZeroConfig) -> Found:
    out, head = _Sentences(), "zero_optimization"
    for name in ("offload_optimizer", "offload_param"):
        block = getattr(zero, name)
        if block is not None and block.device is OffloadDeviceEnum.nvme and not block.nvme_path:
            out.say(f"{head}.{name}.device", f'"nvme" needs {name}.nvme_path, a folder on the drive.')
    if zero.offload_param is not None and zero.stage != 3:
        out.say(f"{head}.offload_param", f"needs stage 3, where parameters are sharded; the stage is {zero.stage}.")
    optimizer = zero.offload_optimizer
    if optimizer is not None and zero.stage != 3:
        if optimizer.ratio < 1.0:
            out.say(f"{head}.offload_optimizer.ratio", "below 1.0 needs stage 3.")
        if optimizer.super_offload:
            out.say(f"{head}.offload_optimizer.super_offload", "needs stage 3.")
    if optimizer is not None and zero.stage == 0:
        out.say(f"{head}.offload_optimizer", "needs stage 1, 2 or 3; the stage is 0.")
    if zero.pipeline_loading_checkpoint and zero.stage != 3:
        out.say(f"{head}.pipeline_loading_checkpoint", f"needs stage 3; the stage is {zero.stage}.")
    if zero.zenflow is not None:
        if optimizer is None or optimizer.device is not OffloadDeviceEnum.cpu:
            out.say(f"{head}.zenflow", 'needs offload_optimizer.device "cpu".')
        if zero.zenflow.offload and not zero.overlap_comm:
            out.say(f"{head}.zenflow.offload", "needs overlap_comm true.")
        out += _zenflow_rules(zero.zenflow)
    return out


def _zenflow_rules(zenflow: ZenFlowConfig) -> Found:
    out, path = _Sentences(), "zero_optimization.zenflow.select_interval"
    select, update = zenflow.select_interval, zenflow.update_interval
    if zenflow.select_strategy == "auto" and select != "auto":
        out.say(
            path,
            f'must be "auto" with select_strategy "auto", not {select}. Choose "step" or "epoch" to set an interval.',
        )
    if zenflow.select_strategy != "auto" and select == "auto":
        out.say(path, f'must be a number with select_strategy "{zenflow.select_strategy}".')
    if isinstance(select, int) and isinstance(update, int) and zenflow.select_strategy == "step" and select < update:
        out.say(path, f"{select} must be at least update_interval, which is {update}.")
    return out


def _group_rules(cfg: "DeepSpeedConfig", *, world_size: int) -> Found:
    out, zero = _Sentences(), cfg.zero
    for key, size in (
        ("mics_shard_size", zero.mics_shard_size),
        ("zero_hpz_partition_size", zero.zero_hpz_partition_size),
    ):
        if size > 1 and world_size % size:
            said = f"{size} does not divide the {world_size} data-parallel ranks. Use a divisor of {world_size}."
            out.say(f"zero_optimization.{key}", said)
    if (
        zero.mics_shard_size > 0
        and zero.zero_hpz_partition_size > 1
        and zero.mics_shard_size != zero.zero_hpz_partition_size
    ):
        said = (
            f"{zero.mics_shard_size} and zero_hpz_partition_size {zero.zero_hpz_partition_size} both choose the "
            "shard group. Keep one."
        )
        out.say("zero_optimization.mics_shard_size", said)
    return out


def _optimizer_rules(cfg: "DeepSpeedConfig") -> Found:
    """Parameters that the chosen optimizer has only with, or only without, offloaded state."""
    out = _Sentences()
    taken = accepts("optimizer", cfg.optimizer.type) if cfg.optimizer is not None else None
    if cfg.optimizer is None or taken is None:
        return out
    offloads = cfg.zero.offload_optimizer is not None
    absent, how = (taken.on_device, "with") if offloads else (taken.on_host, "without")
    for key in cfg.optimizer.params:
        if key in absent:
            out.say(
                f"optimizer.params.{key}",
                f"is not a setting of {cfg.optimizer.type} {how} zero_optimization.offload_optimizer.",
            )
    return out


def rule_violations(cfg: "DeepSpeedConfig", *, lenient: bool) -> list[Violation]:
    """Every rule between keys that ``cfg`` breaks: (path, sentence).

    ``lenient`` leaves out what depends on the number of ranks.
    """
    groups = [] if lenient else _group_rules(cfg, world_size=cfg.world_size)
    return [*_precision_rules(cfg), *_reduction_rules(cfg), *_offload_rules(cfg.zero), *groups, *_optimizer_rules(cfg)]


# Read only where parameters are sharded over the ranks.
_PARAMETERS_SHARDED = (
    "allgather_sequential",
    "gather_16bit_weights_on_model_save",
    "leaf_module.classes",
    "leaf_module.names",
    "leaf_module.name_suffixes",
    "max_live_parameters",
    "max_reuse_distance",
    "mics_shard_size",
    "model_persistence_threshold",
    "param_persistence_threshold",
    "prefetch_bucket_size",
    "zero_hpz_partition_size",
)
_DYNAMIC_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


def inert_under(cfg: "DeepSpeedConfig") -> dict[str, str]:
    """Canonical path -> why, for every key that works in general and has no effect beside the others of ``cfg``."""
    why: dict[str, str] = {}
    if cfg.zero.stage != 3:
        why |= dict.fromkeys(
            (f"zero_optimization.{name}" for name in _PARAMETERS_SHARDED),
            f"stage {cfg.zero.stage} does not shard parameters",
        )
    if not cfg.fp16.enabled:
        why |= dict.fromkeys(
            (f"fp16.{name}" for name in (*_DYNAMIC_SCALE, "loss_scale", "auto_cast")), "fp16.enabled is false"
        )
    elif not cfg.fp16.dynamic:
        why |= dict.fromkeys((f"fp16.{name}" for name in _DYNAMIC_SCALE), "fp16.loss_scale is a fixed number")
    if not cfg.bf16.enabled:
        why["bf16.check_grad_overflow"] = "bf16.enabled is false"
    if not cfg.torch_autocast.enabled:
        why |= dict.fromkeys(
            ("torch_autocast.dtype", "torch_autocast.lower_precision_safe_modules"), "torch_autocast.enabled is false"
        )
    if cfg.compute_dtype == "fp32":
        why["data_types.keep_in_fp32_modules"] = "nothing is cast: neither fp16 nor bf16 is enabled"
    if cfg.gradient_allreduce_op == "sum":
        why |= dict.fromkeys(("prescale_gradients", "gradient_predivide_factor"), 'gradient_allreduce_op is "sum"')
    elif cfg.prescale_gradients:
        why["gradient_predivide_factor"] = "prescale_gradients divides by all ranks at once"
    return why
