"""Rules between keys. Each function returns sentences; an empty list means the combination makes sense."""

from typing import TYPE_CHECKING

from deepspeed.config.removed import REMOVED_OPTIMIZERS
from deepspeed.config.zero import OffloadDeviceEnum, ZeroConfig

if TYPE_CHECKING:
    from deepspeed.config.root import DeepSpeedConfig

_NUMERIC_PARAMS = ("lr", "eps", "weight_decay", "momentum", "muon_lr", "adam_lr")


def _precision_rules(cfg: "DeepSpeedConfig") -> list[str]:
    out = []
    fp16, bf16, zero = cfg.fp16, cfg.bf16, cfg.zero
    host_optimizer = zero.offload_optimizer is not None and zero.offload_optimizer.device is OffloadDeviceEnum.cpu
    if fp16.enabled and bf16.enabled:
        out.append("fp16.enabled and bf16.enabled are both true. Keep one: a model computes in one 16-bit dtype.")
    if fp16.enabled and fp16.dynamic:
        for key in ("loss_scale_window", "min_loss_scale"):
            if getattr(fp16, key) <= 0:
                out.append(f"fp16.{key} must be at least 1 with a dynamic loss scale, not {getattr(fp16, key)}.")
    for path, wanted, alone in (
        ("fp16.fp16_master_weights_and_grads", fp16.fp16_master_weights_and_grads, True),
        ("bf16.bf16_master_weights_and_grads", bf16.bf16_master_weights_and_grads, not bf16.bf16_optimizer_states),
    ):
        if wanted and zero.stage == 0:
            out.append(f"{path} needs zero_optimization.stage 1, 2 or 3.")
        elif wanted and alone and not host_optimizer:
            out.append(f'{path} needs zero_optimization.offload_optimizer.device "cpu".')
    if bf16.bf16_optimizer_states and not (bf16.bf16_master_weights_and_grads and zero.stage > 0):
        out.append("bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads and zero_optimization.stage 1, 2 or 3.")
    if cfg.data_types.param_dtype not in (None, cfg.compute_dtype):
        out.append(
            f"data_types.param_dtype is {cfg.data_types.param_dtype}, but the fp16 and bf16 blocks say {cfg.compute_dtype}. "
            "Delete param_dtype or enable the matching block."
        )
    if cfg.torch_autocast.enabled and zero.zero_quantized_weights:
        out.append("torch_autocast.enabled and zero_optimization.zero_quantized_weights exclude each other. Switch one off.")
    return out


def _reduction_rules(cfg: "DeepSpeedConfig") -> list[str]:
    out = []
    zero = cfg.zero
    scatters = zero.reduce_scatter and (zero.stage == 3 or (zero.stage == 2 and cfg.gradient_allreduce_op == "mean"))
    if scatters and cfg.prescale_gradients:
        out.append(f"prescale_gradients cannot be combined with zero_optimization.stage {zero.stage} and reduce_scatter. Set it to false.")
    if scatters and cfg.gradient_predivide_factor != 1.0:
        out.append(
            f"gradient_predivide_factor must be 1.0, not {cfg.gradient_predivide_factor}, "
            f"with zero_optimization.stage {zero.stage} and reduce_scatter."
        )
    if cfg.gradient_allreduce_op == "sum" and (zero.stage == 3 or zero.zenflow is not None):
        where = "zero_optimization.stage 3" if zero.stage == 3 else "zero_optimization.zenflow"
        out.append(f'gradient_allreduce_op "sum" cannot be combined with {where}. Use "mean" and scale the loss.')
    if zero.zero_quantized_gradients and not zero.reduce_scatter:
        out.append("zero_optimization.zero_quantized_gradients needs zero_optimization.reduce_scatter true.")
    if not cfg.managed_gradient_accumulation and zero.overlap_comm and zero.stage < 2:
        out.append(
            "managed_gradient_accumulation false allows zero_optimization.overlap_comm only from stage 2 on. Set overlap_comm to false."
        )
    if not zero.compute_grad_norm:
        if zero.stage not in (1, 2):
            out.append(f"zero_optimization.compute_grad_norm false needs stage 1 or 2, not {zero.stage}.")
        if cfg.gradient_clipping > 0:
            out.append(
                "zero_optimization.compute_grad_norm false needs gradient_clipping 0 (it is 1.0 when absent): clipping uses the norm."
            )
        if zero.offload_optimizer is not None or zero.zenflow is not None:
            out.append("zero_optimization.compute_grad_norm false cannot be combined with offload_optimizer or zenflow.")
    return out


def _offload_rules(zero: ZeroConfig) -> list[str]:
    out = []
    for name in ("offload_optimizer", "offload_param"):
        block = getattr(zero, name)
        if block is not None and block.device is OffloadDeviceEnum.nvme and not block.nvme_path:
            out.append(f'zero_optimization.{name}.device "nvme" needs {name}.nvme_path, a folder on the drive.')
    if zero.offload_param is not None and zero.stage != 3:
        out.append(f"zero_optimization.offload_param needs stage 3, where parameters are sharded; the stage is {zero.stage}.")
    if zero.offload_optimizer is not None and zero.stage != 3:
        if zero.offload_optimizer.ratio < 1.0:
            out.append("zero_optimization.offload_optimizer.ratio below 1.0 needs stage 3.")
        if zero.offload_optimizer.super_offload:
            out.append("zero_optimization.offload_optimizer.super_offload needs stage 3.")
    if zero.pipeline_loading_checkpoint and zero.stage != 3:
        out.append(f"zero_optimization.pipeline_loading_checkpoint needs stage 3; the stage is {zero.stage}.")
    if zero.zenflow is not None:
        if zero.offload_optimizer is None or zero.offload_optimizer.device is not OffloadDeviceEnum.cpu:
            out.append('zero_optimization.zenflow needs offload_optimizer.device "cpu".')
        if zero.zenflow.offload and not zero.overlap_comm:
            out.append("zero_optimization.zenflow.offload needs overlap_comm true.")
    return out


def _group_rules(cfg: "DeepSpeedConfig", *, world_size: int) -> list[str]:
    out = []
    for key, size in (("mics_shard_size", cfg.zero.mics_shard_size), ("zero_hpz_partition_size", cfg.zero.zero_hpz_partition_size)):
        if size > 1 and world_size % size:
            out.append(
                f"zero_optimization.{key} {size} does not divide the {world_size} data-parallel ranks. Use a divisor of {world_size}."
            )
    if cfg.zero.mics_shard_size == 0 or cfg.zero.mics_shard_size < -1:
        out.append(f"zero_optimization.mics_shard_size must be -1 (off) or the ranks of one shard group, not {cfg.zero.mics_shard_size}.")
    return out


def _optimizer_rules(cfg: "DeepSpeedConfig", *, lenient: bool) -> list[str]:
    out = []
    for name, block in (("optimizer", cfg.optimizer), ("scheduler", cfg.scheduler)):
        autos = (
            [] if block is None or lenient else [key for key, value in block.params.items() if isinstance(value, str) and value == "auto"]
        )
        for key in autos:
            out.append(f'{name}.params.{key} is still "auto". Only an integration (Transformers, Accelerate) fills that in; write a value.')
    if cfg.optimizer is None:
        return out
    substitute = REMOVED_OPTIMIZERS.get(cfg.optimizer.type.lower())
    if substitute is not None:
        out.append(f"optimizer.type {cfg.optimizer.type!r} was removed with compressed communication. Use {substitute!r}.")
    if "max_grad_norm" in cfg.optimizer.params and not lenient:
        out.append("optimizer.params.max_grad_norm is not read. Set the top-level key gradient_clipping instead.")
    for key in _NUMERIC_PARAMS:
        value = cfg.optimizer.params.get(key)
        if isinstance(value, str | bool) and value != "auto":
            out.append(f"optimizer.params.{key} must be a number, not {value!r}.")
    return out


def rule_violations(cfg: "DeepSpeedConfig", *, lenient: bool) -> list[str]:
    """Every rule between keys that ``cfg`` breaks, as sentences.

    ``lenient`` leaves out what depends on the number of ranks and on values an integration fills in later.
    """
    groups = [] if lenient else _group_rules(cfg, world_size=cfg.world_size)
    return [
        *_precision_rules(cfg),
        *_reduction_rules(cfg),
        *_offload_rules(cfg.zero),
        *groups,
        *_optimizer_rules(cfg, lenient=lenient),
    ]
