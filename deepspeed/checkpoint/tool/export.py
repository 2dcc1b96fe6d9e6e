"""``ds_checkpoint export`` and ``import``: weights, or everything, to and from the formats of other programs."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.foreign.rewrite import write_checkpoint
from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.save.writer import progress
from deepspeed.checkpoint.tool import reference_layout
from deepspeed.checkpoint.tool.common import appearing, opened
from deepspeed.checkpoint.weights.weights import (
    Stream,
    open_facts,
    shared_names,
    stream,
    total_bytes,
    weight_streams,
    with_aliases,
    write_weights,
)
from deepspeed.device import DTYPES
from deepspeed.errors import CheckpointError
from deepspeed.observe.program import say, size

FORMATS = ("hf", "fp32", "dcp", "deepspeed", "torch")
CHOICES = {**DTYPES, "keep": None}


def run(args: Namespace) -> int:
    """Export as the command line says; 0. Raises CheckpointError, OSError."""
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file; name a folder to write to")
    if not args.overwrite and out.is_dir() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; name another folder, or pass --overwrite")
    fixed = {"fp32": "fp32", "deepspeed": "keep"}.get(args.format)
    if fixed and args.dtype not in (None, fixed):
        raise CheckpointError(
            f"--format {args.format} has its own dtypes; leave --dtype {args.dtype} out, or choose another format"
        )
    with opened(args.checkpoint, args.tag, allow_pickle=args.allow_pickle) as source:
        if args.format == "deepspeed":
            return _deepspeed(source, out, args)
        dtype = CHOICES[args.dtype or fixed or "keep"]
        streams = weight_streams(source, dtype=dtype, exclude_frozen=args.exclude_frozen)
        if not streams:
            raise CheckpointError(f"{source.path} holds no weights")
        if args.format == "dcp":
            return _dcp(source, out, streams)
        hf, limit, shared = args.format == "hf", args.max_shard_size, shared_names(source)
        total = total_bytes(streams)
        with progress("export", total) as advance:
            paths = write_weights(streams, out, safetensors=hf, max_shard_bytes=limit, shared=shared, progress=advance)
    ends = paths if len(paths) < 4 else [paths[0], paths[-1]]
    say(f"wrote {len(streams)} tensors, {size(total)}, to {', '.join(map(str, ends))}")
    return 0


def _deepspeed(source: Source, out: Path, args: Namespace) -> int:
    world = args.world or int((open_facts(source).get("world") or {}).get("size") or 1)
    with appearing(out) as hidden:
        folder = reference_layout.write(
            source, hidden, level=args.zero, world=world, exclude_frozen=args.exclude_frozen
        )
    how = f"engine.load_checkpoint({str(out)!r}) under the same configuration"
    say(f"wrote {out / folder.name} for {world} ranks; load it with {how}")
    return 0


def _dcp(source: Source, out: Path, streams: list[Stream]) -> int:
    """Weights, and optimizer state by parameter names in the shape of torch.distributed.checkpoint.state_dict."""
    from deepspeed.checkpoint.tool.dcp import write_dcp  # noqa: PLC0415 - slow to import, and only this format needs it

    model = with_aliases({s.name: s for s in streams}, shared_names(source))
    facts = source.facts.get("optimizer") or {}
    state: dict[str, dict[str, Any]] = {
        name: {slot: v if isinstance(v, torch.Tensor) else torch.tensor(float(v)) for slot, v in scalars.items()}
        for name, scalars in (facts.get("scalars") or {}).items()
    }
    slots = {key: stream(source, key) for key in source.entries if key[0].startswith("optim.")}
    for (slot, name), values in slots.items():
        state.setdefault(name, {})[slot.removeprefix("optim.")] = values
    groups = [{**group["options"], "params": list(group["names"])} for group in facts.get("groups") or []]
    optim = {"state": state, "param_groups": groups} if state or groups else {}
    tree = {"model": model, "optim": optim, "engine": source.facts.get("engine") or {}}
    with progress("export", total_bytes([*model.values(), *slots.values()])) as advance, appearing(out) as hidden:
        write_dcp(hidden, {k: v for k, v in tree.items() if v}, advance)
    say(f"wrote {out}: model, optim and engine, for torch.distributed.checkpoint.load")
    return 0


def run_import(args: Namespace) -> int:
    """Convert; 0. Raises CheckpointError for one of this package's, and when the tag is there already."""
    out = Path(args.out)
    with opened(args.source, args.tag) as source:
        if source.kind == "deepspeed-checkpoint":  # anew it would have no generators and one rank's client state
            raise CheckpointError(
                f"{source.path} is a checkpoint of this package already, and loads anywhere as it is; copy its folder"
            )
        name = args.as_tag or source.path.name
        if (out / name).exists():
            raise CheckpointError(f"{out / name} is there already; name another folder, or another tag with --as")
        with progress("import", total_bytes(stream(source, key) for key in source.entries)) as advance:
            final = write_checkpoint(source, out, name, advance=advance)
        say(f"wrote {final}: {len(source.entries)} tensors from {source.kind}")
    what = "random generators and the position in the data, which DeepSpeed's files do not have in a usable form"
    say(f"not kept: {what}")
    return 0
