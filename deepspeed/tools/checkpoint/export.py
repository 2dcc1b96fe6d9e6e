"""``ds_checkpoint export`` and ``import``: weights, or everything, to and from the formats of other programs."""

import contextlib
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from deepspeed.accelerator.device import DTYPES
from deepspeed.checkpoint.foreign.optimizer_state import UNNAMED
from deepspeed.checkpoint.foreign.rewrite import write_checkpoint
from deepspeed.checkpoint.foreign.weights import (
    open_facts,
    shared_names,
    stream,
    total_bytes,
    weight_streams,
    with_aliases,
    write_weights,
)
from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.load.reader import find_and_open
from deepspeed.checkpoint.save.writer import progress
from deepspeed.errors import CheckpointError, counted
from deepspeed.monitor.program import say, size
from deepspeed.tools.checkpoint import reference_layout

CHOICES = {**DTYPES, "keep": None}


@contextlib.contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside ``out``; its content moves into ``out`` if the body ends well, else it vanishes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with folders.temporary_for(out) as hidden:
        hidden.mkdir()
        yield hidden
        if not out.exists():
            try:
                os.rename(hidden, out)
            except OSError:  # another process may have been faster
                if not out.is_dir():
                    raise
        for path in hidden.iterdir() if hidden.exists() else ():
            if (target := out / path.name).is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
        folders.sync(out)


def run(args: Namespace) -> int:
    """Export as the command line says and return 0. Raises CheckpointError, OSError."""
    out = Path(args.out).resolve()  # "." too has a name then
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file; name a folder to write to")
    if not args.overwrite and out.is_dir() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; name another folder, or pass --overwrite")
    fixed = {"fp32": "fp32", "deepspeed": "keep"}.get(args.format)
    if fixed and args.dtype not in (None, fixed):
        raise CheckpointError(f"--format {args.format} has its own dtypes; leave --dtype {args.dtype} out")
    source = find_and_open(Path(args.checkpoint), args.tag, allow_pickle=args.allow_pickle)
    with contextlib.closing(source):
        kinds = {"dcp": ("extra", "grad", "opaque.", "part."), "deepspeed": ("grad",)}.get(args.format, ("extra",))
        if "grad" in kinds and any(name.startswith(UNNAMED) for _, name in source.entries):
            raise CheckpointError(f"{source.path} has no names for optimizer state; load it into an engine and save it")
        states = {state for state, _ in source.entries} | {name for name, value in open_facts(source).items() if value}
        if left := sorted({state.partition("@")[0] for state in states if state.startswith(kinds)}):
            say(f"left out, as there is no place for it in --format {args.format}: {', '.join(left)}")
        if args.format == "deepspeed":
            world = args.world or int((open_facts(source).get("world") or {}).get("size") or 1)
            with appearing(out) as hidden:
                folder = reference_layout.write(
                    source, hidden, level=args.zero, world=world, exclude_frozen=args.exclude_frozen
                )
            how = f"engine.load_checkpoint({str(out)!r}) under the same configuration, on data-parallel ranks alone"
            say(f"wrote {out / folder.name} for {counted(world, 'rank')}; load it with {how}")
            return 0
        dtype, shared = CHOICES[args.dtype or fixed or "keep"], shared_names(source)
        streams = weight_streams(source, dtype=dtype, exclude_frozen=args.exclude_frozen)
        if not streams:
            raise CheckpointError(f"{source.path} holds no {'trained ' if args.exclude_frozen else ''}weights")
        if args.format == "dcp":
            from deepspeed.tools.checkpoint.dcp import write_dcp  # noqa: PLC0415 - slow to import, for this format only

            with appearing(out) as hidden:
                write_dcp(source, hidden, with_aliases({s.name: s for s in streams}, shared))
            say(f"wrote {out}: model, optim and engine, for torch.distributed.checkpoint.load")
            return 0
        hf, limit, total = args.format == "hf", args.max_shard_size, total_bytes(streams)
        with progress("export", total) as advance:
            paths = write_weights(streams, out, safetensors=hf, max_shard_size=limit, shared=shared, progress=advance)
    ends = paths if len(paths) < 4 else [paths[0], paths[-1]]
    say(f"wrote {counted(len(streams), 'tensor')}, {size(total)}, to {', '.join(map(str, ends))}")
    return 0


def run_import(args: Namespace) -> int:
    """Convert and return 0. Raises CheckpointError for a checkpoint of this package, and where the tag exists."""
    out = Path(args.out)
    with contextlib.closing(find_and_open(Path(args.source), args.tag)) as source:
        if source.kind == "deepspeed-checkpoint":  # anew it would have no generators and one rank's client state
            raise CheckpointError(f"{source.path} is of this package already, and loads anywhere; copy its folder")
        name = args.as_tag or source.path.name
        if (out / name).exists():
            raise CheckpointError(f"{out / name} is there already; name another folder, or another tag with --as")
        with progress("import", total_bytes(stream(source, key) for key in source.entries)) as advance:
            final = write_checkpoint(source, out, name, advance=advance)
        say(f"wrote {final}: {counted(len(source.entries), 'tensor')} from {source.kind}")
    say(
        "not kept: random generators and the position in the data, which DeepSpeed's files do not have in a usable form"
    )
    return 0
