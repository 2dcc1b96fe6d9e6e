"""One spelling per key: aliases, deprecated, removed and absent keys, before the models see a configuration."""

from collections.abc import Mapping, Set
from typing import Any

from deepspeed.config.explain.messages import Judgement
from deepspeed.config.model.values import BATCH_KEYS, Key, Support, flag, is_auto
from deepspeed.config.parse import enclosing

_GATHERED = "each unit is gathered whole"
_OLD_BUCKET = "Deprecated spelling of zero_optimization.allgather_bucket_size."
_OLD_GATHER = "Deprecated spelling of gather_16bit_weights_on_model_save."
SPELLED: Mapping[str, Key] = {
    "zero_optimization": Key("Deprecated as true or false: true means stage 1."),
    "allgather_size": Key(_OLD_BUCKET, Support.INERT, _GATHERED),
    "zero_optimization.legacy_stage1": Key("Deprecated: false is accepted, true is refused."),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Key(_OLD_GATHER),
    "zero_optimization.grad_hooks": Key("A key of published documentation.", Support.INERT, "no release reads it"),
    "zero_optimization.cpu_offload": Key("Deprecated spelling of offload_optimizer with device cpu."),
    "zero_optimization.cpu_offload_param": Key("Deprecated spelling of offload_param with device cpu."),
    "zero_optimization.cpu_offload_use_pin_memory": Key("Deprecated spelling of pin_memory in the offload blocks."),
    "pipeline.<any>": Key("A key of the client's own; stored, not read.", Support.INERT, "it is the client's"),
}
"""Keys of the format that are no fields: parsing replaces them by what they stand for, or passes over them."""
_STAGE3_SPELLINGS = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
    *("max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold"),
    *("use_all_reduce_for_fetch_params", "allgather_sequential"),
)
ZERO_ALIASES: Mapping[str, str] = {f"stage3_{name}": name for name in _STAGE3_SPELLINGS} | {
    "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save"
}
ALIASES: Mapping[str, Mapping[str, str]] = {
    "zero_optimization": ZERO_ALIASES,
    "tensor_parallel": {"tp": "tensor_parallel", "kernel_inject": "replace_with_kernel_inject"},
}
"""Block -> alias of a key -> its name."""
LEGACY_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
LEGACY_KEYS = (*LEGACY_OFFLOAD, "cpu_offload_use_pin_memory")
_QUANTIZE = "Quantize with the torchao library (its quantization.quantize_, or its QAT quantizers) and train the result"
_PRUNE = "Prune with torch.nn.utils.prune, or use the sparsity tools of the torchao library, and train the result"
REMOVED_KEYS: Mapping[str, str] = {
    "amp": "Use the bf16, fp16 or torch_autocast block instead",
    "sparse_gradients": "Delete the key: gradients of nn.Embedding(sparse=True) are handled without a switch",
    "graph_harvesting": "Delete the key and use the compile block",
    "progressive_layer_drop": "Drop layers in the model's own forward",
    "eigenvalue": "Delete the block: the quantization schedule that used it no longer exists",
    "quantize_training": _QUANTIZE,
    "sparse_attention": "Use torch.nn.attention.flex_attention or the model's own attention",
    "curriculum_learning": "Use the block data_efficiency.data_sampling.curriculum_learning; the keys go under "
    "curriculum_metrics.<name>",
    "nebula": "Use the checkpoint block (checkpoint.writer for how files are written) and an ordinary folder",
    "compression_training": _QUANTIZE,
    "compression_training.layer_reduction": "Build the smaller model yourself and copy the layers to keep into it",
    **{f"compression_training.{name}_quantization": _QUANTIZE for name in ("weight", "activation")},
    **{f"compression_training.{name}_pruning": _PRUNE for name in ("sparse", "row", "head", "channel")},
    "zero_optimization.zeropp_loco_param": "Delete the block: error-feedback quantization no longer exists",
    "zero_optimization.legacy_stage1": "Delete the key: there is one implementation of stage 1",
    **{
        f"optimizer.params.{name}": "Delete the key: compressed-communication optimizers no longer exist"
        for name in (
            *("freeze_step", "cuda_aware", "comm_backend_name", "var_freeze_step", "var_update_scaler", "coeff_beta"),
            *("local_step_scaler", "local_step_clipper", "factor_max", "factor_min", "factor_threshold"),
        )
    },
}
"""Path of a key, or of a whole block, -> what to do instead."""
REMOVED_OPTIMIZERS: Mapping[str, str] = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}


def removed_key(path: str) -> str | None:
    """Return a sentence about a removed key, with the advice of the innermost block that has any; None for others."""
    block = enclosing(path, REMOVED_KEYS)
    return f"{path} was removed. {REMOVED_KEYS[block]}." if block else None


def says_off(value: Any) -> bool:
    """Return whether the value of a removed key only switches the feature off, which needs no replacement."""
    if not isinstance(value, Mapping):
        return value is None or value is False
    if "enabled" in value:
        return value["enabled"] in (None, False)
    if "shared_parameters" in value:
        return says_off(value["shared_parameters"])
    return all(map(says_off, value.values()))


def removed_parts(path: str, value: Any) -> list[str]:
    """Return the removed keys that ``path: value`` asks for, as precise as the advice is; empty when it says "off"."""
    if says_off(value):
        return []
    inner = value if isinstance(value, Mapping) else {}
    asked = [f"{path}.{key}" for key, item in inner.items() if f"{path}.{key}" in REMOVED_KEYS and not says_off(item)]
    return asked or [path]


def canonical_path(path: str) -> str:
    """Return ``path`` in the spelling of the models."""
    head, _, tail = path.partition(".")
    name, dot, rest = tail.partition(".")
    if name in ALIASES.get(head, ()):
        return f"{head}.{ALIASES[head][name]}{dot}{rest}"
    return f"bf16.{tail}" if head == "bfloat16" else path


def one_spelling(head: str, block: dict[str, Any], report: Judgement) -> dict[str, Any]:
    """Replace aliases in the block ``head`` and drop "auto"; two different values of one setting are a fault."""
    out: dict[str, Any] = {}
    for name, value in block.items():
        spelling = ALIASES[head].get(name, name)
        path, canonical = f"{head}.{name}", f"{head}.{spelling}"
        if is_auto(value):
            continue
        if out.setdefault(spelling, value) != value:
            other = report.renames.get(canonical, canonical)
            text = f"{path} and {other} are two spellings of one setting with different values. Keep one."
            report.fault(path, text, unread=False)
        if path != canonical:
            report.renames[canonical] = path
    return out


def _legacy_offload(block: dict[str, Any], report: Judgement) -> None:
    """Replace the old flags ``cpu_offload*`` by the blocks they stand for."""
    given = {key: flag(block.pop(key, None)) for key in LEGACY_KEYS}
    for old, value in given.items():
        path, new = f"zero_optimization.{old}", LEGACY_OFFLOAD.get(old, "pin_memory in the offload blocks")
        if value is not None and not isinstance(value, bool):
            report.fault(path, f"{path} must be true or false, not {value!r}. It is deprecated: use {new}.")
        elif value and old in LEGACY_OFFLOAD and block.get(new) not in (None, False):
            report.fault(path, f"{path} is the deprecated spelling of {new}; both are given. Keep {new}.")
        elif value and old in LEGACY_OFFLOAD:
            block[new] = {"device": "cpu"}
    pin = given["cpu_offload_use_pin_memory"]
    for new in LEGACY_OFFLOAD.values():
        if pin is not None and isinstance(block.get(new), dict):
            block[new] = {"pin_memory": pin, **block[new]}


def canonical_zero(block: dict[str, Any], report: Judgement) -> dict[str, Any]:
    """Return ``block`` with one spelling per setting: aliases resolved, "auto" dropped, absent blocks left out."""
    head = "zero_optimization"
    out = one_spelling(head, block, report)
    _legacy_offload(out, report)
    for name in ("offload_optimizer", "offload_param", "leaf_module", "zenflow"):
        if out.get(name) is False or out.get(name) is None:
            out.pop(name, None)
    for path in [path for path in REMOVED_KEYS if path.startswith(f"{head}.") and path[len(head) + 1 :] in out]:
        if not says_off(out.pop(path[len(head) + 1 :])):
            report.fault(path, str(removed_key(path)))
    offload = out.get("offload_optimizer")
    if not out.get("stage") and isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme"):
        for name in [name for name in ("offload_optimizer", "zenflow") if name in out]:
            report.notes.append(f"{head}.{name} has no effect at stage 0.")  # where TRL puts reference models
            del out[name]
    if isinstance(out.get("grad_hooks"), bool):
        text = f"{head}.grad_hooks is described in published documentation and read by no release. Delete it."
        report.notes.append(text)
        del out["grad_hooks"]
    if out.get("allgather_sequential") is True and out.setdefault("prefetch_bucket_size", 1) != 1:
        paths = (f"{head}.allgather_sequential", f"{head}.prefetch_bucket_size")
        path, other = (report.renames.get(path, path) for path in paths)
        report.fault(path, f"{path} means a {other} of 1. Delete one of them.", unread=False)
    return out


def one_tree(report: Judgement, keys: Set[str]) -> dict[str, Any]:
    """Return the known top-level ``keys`` in one spelling; null means absent (gradient_clipping: a fault)."""
    data = report.source.data
    tree = {name: data[name] for name in keys & data.keys() if data[name] is not None or name == "gradient_clipping"}
    for name in ("gradient_clipping", *BATCH_KEYS):
        if is_auto(tree.get(name)):
            del tree[name]
    if "bf16" not in data and data.get("bfloat16") is not None:
        tree["bf16"], report.renames["bf16"] = data["bfloat16"], "bfloat16"
    for part in ("optimizer", "scheduler"):
        if isinstance(tree.get(part), dict):  # without a name and settings it is no block
            tree[part] = {name: value for name, value in tree[part].items() if value is not None}
            if not tree[part].get("params") and set(tree[part]) <= {"params"}:
                del tree[part]
    zero = tree.get("zero_optimization", {})
    if isinstance(zero, bool):
        text = f"zero_optimization: {str(zero).lower()} is deprecated. Write zero_optimization: {{stage: {int(zero)}}}."
        report.notes.append(text)
        zero = {"stage": int(zero)}
    if isinstance(zero, dict):
        tree["zero_optimization"] = zero = canonical_zero(zero, report)
    if data.get("allgather_size") is not None:
        report.notes.append("allgather_size is deprecated. Write zero_optimization.allgather_bucket_size.")
        if isinstance(zero, dict) and "allgather_bucket_size" not in zero:
            zero["allgather_bucket_size"] = data["allgather_size"]
            report.renames["zero_optimization.allgather_bucket_size"] = "allgather_size"
    head = "tensor_parallel"
    if isinstance(tree.get(head), dict):
        tree[head] = one_spelling(head, tree[head], report)
    return tree
