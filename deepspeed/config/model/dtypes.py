"""The dtype of each quantity of a training step: one rule, for the engine and for ``ds_config show --dtypes``."""

from typing import TYPE_CHECKING, NamedTuple

from deepspeed.config.model.values import DtypeName

if TYPE_CHECKING:
    from deepspeed.config.model.root import DeepSpeedConfig


class DtypePolicy(NamedTuple):
    """Names of dtypes; None means that of the parameter (``compute``: as the model was built).

    ``compute`` is how parameters rest and enter the forward; autograd gives gradients the same dtype. ``low`` is the
    same for the modules that ``torch_autocast.lower_precision_safe_modules`` lists. ``accumulation`` is
    the sum over micro-batches, ``reduction`` what travels between ranks, ``master`` the copy that the optimizer updates
    (its slots follow it), ``buffers`` the model's floating buffers and the parameters of batch norms. fp64 parameters
    keep their precision throughout.
    """

    compute: DtypeName | None
    low: DtypeName
    accumulation: DtypeName
    reduction: DtypeName | None
    master: DtypeName
    buffers: DtypeName | None


def dtype_policy(cfg: "DeepSpeedConfig") -> DtypePolicy:
    """The policy of ``cfg``."""
    return DtypePolicy(
        compute=None if cfg.compute_dtype == "fp32" else cfg.compute_dtype,
        low=cfg.torch_autocast.dtype,
        accumulation=cfg.grad_accum_dtype or "fp32",
        reduction=cfg.communication_data_type,
        master="fp32",
        buffers=cfg.data_types.buffer_dtype,
    )


def dtype_rows(cfg: "DeepSpeedConfig") -> list[tuple[str, str, str]]:
    """The policy as a table for people: the quantity, its dtype in words, and the keys that decide it."""
    policy, autocast, keep = dtype_policy(cfg), cfg.torch_autocast, cfg.data_types.keep_in_fp32_modules
    built, same = "as the model is built", policy.compute or "as the parameter"
    switch = f"{policy.compute}.enabled" if policy.compute else "no fp16 or bf16 block is on"
    kept = "those the model lists" if keep == "auto" else ", ".join(keep) or "none"
    kept = kept if policy.compute else "no matter: nothing is cast"
    master = policy.master if policy.compute else f"{policy.master}; the parameters themselves where they are"
    norms = "as the running statistics, which are buffers"
    rows = [
        ("parameters", policy.compute or built, switch),
        ("modules kept in fp32", kept, "data_types.keep_in_fp32_modules"),
        ("parameters of batch norms", norms, "fixed: torch computes with both in one"),
        ("forward arithmetic", f"autocast to {autocast.dtype}" if autocast.enabled else same, "torch_autocast"),
        ("gradients (autograd)", same, "follow the parameters"),
        ("accumulation", policy.accumulation, "data_types.grad_accum_dtype"),
        ("reduction (wire)", policy.reduction or same, "communication_data_type, else the parameters"),
        ("master weights", master, "fixed"),
        ("optimizer states", policy.master, "follow the master weights"),
        ("buffers", policy.buffers or built, "data_types.buffer_dtype"),
    ]
    if autocast.enabled and autocast.lower_precision_safe_modules:
        listed = f"{policy.low}, gradients and wire too: {', '.join(autocast.lower_precision_safe_modules)}"
        rows.insert(1, ("modules autocast lists", listed, "torch_autocast.lower_precision_safe_modules"))
    return rows
