"""``ds_checkpoint export``: weights, or everything, for other programs; no process group, pieces of tensors in
memory.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.save.writer import progress
from deepspeed.checkpoint.tool import reference_layout
from deepspeed.checkpoint.tool.common import appearing, opened, say, sized
from deepspeed.checkpoint.weights.weight_files import SAFETENSORS, TORCH, check_empty, write_weights
from deepspeed.checkpoint.weights.weights import Stream, open_facts, shared_names, stream, total_bytes, weight_streams
from deepspeed.config.model.values import byte_count
from deepspeed.errors import CheckpointError

FORMATS = ("hf", "fp32", "dcp", "deepspeed", "torch")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "keep": None}


def run(args: Namespace) -> int:
    """Export as the command line says; 0. Raises CheckpointError, OSError."""
    out = Path(args.out)
    check_empty(out, overwrite=args.overwrite)
    wanted = args.dtype or ("fp32" if args.format == "fp32" else "keep")
    if args.format in ("fp32", "deepspeed") and args.dtype not in (None, "fp32" if args.format == "fp32" else "keep"):
        raise CheckpointError(
            f"--format {args.format} has its own dtypes; leave --dtype {args.dtype} out, or choose another format"
        )
    with opened(Path(args.checkpoint), args.tag, allow_pickle=args.allow_pickle) as source:
        if args.format == "deepspeed":
            return _deepspeed(source, out, args)
        streams = weight_streams(source, dtype=DTYPES[wanted], exclude_frozen=args.exclude_frozen)
        if not streams:
            raise CheckpointError(f"{source.path} holds no weights")
        if args.format == "dcp":
            return _dcp(source, out, streams)
        kind = SAFETENSORS if args.format == "hf" else TORCH
        limit = byte_count(args.max_shard_size)
        with progress("export", total_bytes(streams)) as told:
            written = write_weights(
                streams, out, kind, max_shard_bytes=limit, shared=shared_names(source), progress=told
            )
    say(f"wrote {len(streams)} tensors, {sized(total_bytes(streams))}, to {', '.join(str(p) for p in _ends(written))}")
    return 0


def _ends(paths: list[Path]) -> list[Path]:
    return paths if len(paths) < 4 else [paths[0], paths[-1]]


def _deepspeed(source: Source, out: Path, args: Namespace) -> int:
    world = args.world or int((open_facts(source).get("world") or {}).get("size") or 1)
    with appearing(out) as hidden:
        folder = reference_layout.write(
            source, hidden, level=args.zero, world=world, exclude_frozen=args.exclude_frozen
        )
    say(
        f"wrote {out / folder.name} for {world} ranks; load it with engine.load_checkpoint({str(out)!r}) under "
        "the same configuration"
    )
    return 0


def optimizer_tree(source: Source) -> dict[str, Any]:
    """Optimizer state by parameter names, in the shape of torch.distributed.checkpoint.state_dict."""
    facts = source.facts.get("optimizer") or {}
    state: dict[str, dict[str, Any]] = {}
    for name, scalars in (facts.get("scalars") or {}).items():
        state[name] = {
            slot: v if isinstance(v, torch.Tensor) else torch.tensor(float(v)) for slot, v in scalars.items()
        }
    for key in source.entries:
        if key[0].startswith("optim."):
            state.setdefault(key[1], {})[key[0].removeprefix("optim.")] = stream(source, key)
    groups = [{**group["options"], "params": list(group["names"])} for group in facts.get("groups") or []]
    return {"state": state, "param_groups": groups} if state or groups else {}


def _dcp(source: Source, out: Path, streams: list[Stream]) -> int:
    from deepspeed.checkpoint.tool.dcp import write_dcp  # noqa: PLC0415 - slow to import, and only this format needs it

    model = {s.name: s for s in streams}
    model |= {alias: model[name] for alias, name in shared_names(source).items() if name in model}
    tree: dict[str, Any] = {"model": model, "optim": optimizer_tree(source), "engine": source.facts.get("engine") or {}}
    slots = sum(stream(source, key).nbytes for key in source.entries if key[0].startswith("optim."))
    with progress("export", total_bytes(model.values()) + slots) as told, appearing(out) as hidden:
        write_dcp(hidden, {k: v for k, v in tree.items() if v}, told)
    say(f"wrote {out}: model, optim and engine, for torch.distributed.checkpoint.load")
    return 0
