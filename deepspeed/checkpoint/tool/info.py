"""``ds_checkpoint info``: what a checkpoint holds, without reading its tensors."""

from math import prod
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.tool.common import opened, say, sized
from deepspeed.checkpoint.weights.weights import compute_dtype, open_facts, shared_names
from deepspeed.errors import CheckpointError


def _dtype(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _facts(source: Source) -> dict[str, Any]:
    try:
        return source.facts
    except CheckpointError as error:  # client state that would need pickle
        known = open_facts(source)
        return {**{k: known.get(k) for k in ("saved", "engine", "world", "config")}, "client_state": str(error)}


def _config_line(config: dict[str, Any]) -> str:
    zero = config.get("zero_optimization") or {}
    words = [f"ZeRO {zero.get('stage', 0)}"] if isinstance(zero, dict) else []
    for name in ("offload_optimizer", "offload_param"):
        block = zero.get(name) if isinstance(zero, dict) else None
        if isinstance(block, dict) and block.get("device", "none") != "none":
            words.append(f"{name} {block['device']}")
    for name in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        if config.get(name) is not None:
            words.append(f"{name} {config[name]}")
    return ", ".join(words)


def lines(source: Source, *, tensors: bool) -> list[str]:
    """The report."""
    facts = _facts(source)
    saved, engine = facts.get("saved") or {}, facts.get("engine") or {}
    optimizer, client = facts.get("optimizer") or {}, facts.get("client_state")
    found = [f"checkpoint  {source.path}", f"format      {source.kind}"]
    if saved:
        found.append("saved       " + ", ".join(f"{k} {v}" for k, v in saved.items()))
    if engine:
        found.append("counters    " + ", ".join(f"{k} {v}" for k, v in engine.items()))
    found.append(
        f"world       {(facts.get('world') or {}).get('size', '?')} ranks, trained in {_dtype(compute_dtype(facts))}"
    )
    if facts.get("config"):
        found.append(f"config      {_config_line(facts['config'])}")
    if optimizer:
        groups = optimizer.get("groups") or []
        rates = ", ".join(str(g["options"].get("lr")) for g in groups)
        found.append(f"optimizer   {optimizer.get('type') or 'not named'}, {len(groups)} groups, lr {rates}")
    for name in ("lr_scheduler", "loss_scaler"):
        if facts.get(name):
            found.append(f"{name:<11} {str(facts[name])[:160]}")
    if client:
        found.append(f"client      {', '.join(map(str, client)) if isinstance(client, dict) else client}")
    if shared_names(source):
        found.append("tied        " + ", ".join(f"{a} = {n}" for a, n in shared_names(source).items()))
    found += ["", *_totals(source)]
    return [*found, "", *_tensors(source)] if tensors else found


def _totals(source: Source) -> list[str]:
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for (state, _), described in source.entries.items():
        numel = prod(described.shape)
        for row in ((state, _dtype(described.dtype)), ("total", "")):
            found.setdefault(row, []).append((numel, numel * described.dtype.itemsize))
    found["total", ""] = found.pop(("total", ""), [])  # the last row
    rows = [f"{'state':<24} {'dtype':<9} {'tensors':>8} {'elements':>15} {'bytes':>10}"]
    for (state, dtype), sizes in found.items():
        numel, nbytes = (sum(column) for column in zip((0, 0), *sizes, strict=True))
        rows.append(f"{state:<24} {dtype:<9} {len(sizes):>8} {numel:>15,} {sized(nbytes):>10}")
    return rows


def _tensors(source: Source) -> list[str]:
    return [
        f"{state:<24} {_dtype(d.dtype):<9} {'x'.join(map(str, d.shape)) or 'scalar':<20} {name}"
        for (state, name), d in source.entries.items()
    ]


def run(path: Path, tag: str | None, *, tensors: bool) -> int:
    """Print the report; 0."""
    with opened(path, tag) as source:
        for line in lines(source, tensors=tensors):
            say(line)
    return 0
