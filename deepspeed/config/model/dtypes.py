"""Which dtype each quantity of a training step has. One rule, read by the engine and shown by ``ds_config show
--dtypes``.
"""

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


class DtypeRow(NamedTuple):
    """One line of the table for people: the quantity, its dtype in words, and the keys that decide it."""

    quantity: str
    dtype: str
    decided_by: str


def dtype_policy(cfg: "DeepSpeedConfig") -> DtypePolicy:
    """The policy of ``cfg``."""
    compute = None if cfg.compute_dtype == "fp32" else cfg.compute_dtype
    return DtypePolicy(
        compute=compute,
        low=cfg.torch_autocast.dtype,
        accumulation=cfg.grad_accum_dtype or "fp32",
        reduction=cfg.communication_data_type,
        master="fp32",
        buffers=cfg.data_types.buffer_dtype,
    )


def dtype_rows(cfg: "DeepSpeedConfig") -> list[DtypeRow]:
    """The policy as a table."""
    policy = dtype_policy(cfg)
    own = "as the model is built"
    params = policy.compute or own
    same = policy.compute or "as the parameter"
    switch = (
        "bf16.enabled"
        if policy.compute == "bf16"
        else "fp16.enabled"
        if policy.compute == "fp16"
        else "no fp16 or bf16 block is on"
    )
    keep = cfg.data_types.keep_in_fp32_modules
    kept = "those the model lists" if keep == "auto" else ", ".join(keep) or "none"
    autocast = cfg.torch_autocast
    rows = [
        DtypeRow("parameters", params, switch),
        DtypeRow(
            "modules kept in fp32",
            kept if policy.compute else "no matter: nothing is cast",
            "data_types.keep_in_fp32_modules",
        ),
        DtypeRow(
            "parameters of batch norms",
            "as the running statistics, which are buffers",
            "fixed: torch computes with both in one",
        ),
        DtypeRow("forward arithmetic", f"autocast to {autocast.dtype}" if autocast.enabled else same, "torch_autocast"),
        DtypeRow("gradients (autograd)", same, "follow the parameters"),
        DtypeRow("accumulation", policy.accumulation, "data_types.grad_accum_dtype"),
        DtypeRow("reduction (wire)", policy.reduction or same, "communication_data_type, else the parameters"),
        DtypeRow(
            "master weights",
            policy.master if policy.compute else f"{policy.master}; the parameters themselves where they are",
            "fixed",
        ),
        DtypeRow("optimizer states", policy.master, "follow the master weights"),
        DtypeRow("buffers", policy.buffers or own, "data_types.buffer_dtype"),
    ]
    if autocast.enabled and autocast.lower_precision_safe_modules:
        listed = f"{policy.low}, gradients and wire too: {', '.join(autocast.lower_precision_safe_modules)}"
        rows.insert(1, DtypeRow("modules autocast lists", listed, "torch_autocast.lower_precision_safe_modules"))
    return rows
