"""``ds_checkpoint info`` and ``audit``: what a checkpoint holds, and what its files are."""

import contextlib
import pickletools
import re
import zipfile
from argparse import Namespace
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.foreign.weights import block_of, compute_dtype, open_facts, shared_names
from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.load.compare import optimizer_kind
from deepspeed.checkpoint.load.reader import find_and_open, located, read_manifest
from deepspeed.checkpoint.load.source import Source
from deepspeed.errors import CheckpointError, counted
from deepspeed.monitor.program import say, size

_UNREAD = "not part of the checkpoint, never read"


def run(args: Namespace) -> int:
    """Print what the checkpoint holds and return 0."""
    with contextlib.closing(find_and_open(Path(args.checkpoint), args.tag)) as source:
        say("\n".join([*_facts(source), "", *_tensors(source, per_tensor=args.tensors)]))
    return 0


def _facts(source: Source) -> list[str]:
    facts = open_facts(source)
    try:
        facts = source.facts
    except CheckpointError as error:  # client state that would need pickle
        facts = {**{k: facts.get(k) for k in ("saved", "engine", "world", "config")}, "client_state": str(error)}
    optimizer, client = facts.get("optimizer") or {}, facts.get("client_state")
    groups = [
        f"{counted(len(g['names']), 'parameter')} with lr {_shown(g['options'].get('lr'))}"
        for g in optimizer.get("groups") or []
    ]
    configured, kind = block_of(facts.get("config"), "optimizer").get("type"), optimizer.get("type")
    name = kind or "not named" if configured in (None, kind) else f"{configured} ({kind or 'not named'})"
    if configured and kind and optimizer_kind(configured) != optimizer_kind(kind):
        name = f"{kind} of the script, not the configuration's {configured}"
    world, zero = (facts.get("world") or {}).get("size", "?"), block_of(facts.get("config"), "zero_optimization")
    dtype = str(compute_dtype(facts)).removeprefix("torch.")
    rows = {
        "checkpoint": f"{source.path} ({source.kind})",
        "world": f"{world} rank{'' if world == 1 else 's'}, trained in {dtype} under ZeRO {zero.get('stage', 0)}",
        "optimizer": optimizer and f"{name}, {counted(len(groups), 'group')}: {', '.join(groups)}",
        "client": ", ".join(map(str, client)) if isinstance(client, dict) else client,
        "tied": ", ".join(f"{alias} = {name}" for alias, name in shared_names(source).items()),
    }
    for name in ("saved", "engine", "lr_scheduler", "loss_scaler", "config"):
        values = facts.get(name) or {}
        items = values.items() if isinstance(values, dict) else [("state", values)]
        rows[name] = ", ".join(f"{key} {_shown(value)[:160]}" for key, value in items if value is not None)
    return [f"{name:<12} {value}" for name, value in rows.items() if value]


def _shown(value: Any) -> str:
    """Format a value of the facts, which keep floats by their bits."""
    return f"{float.fromhex(value):g}" if isinstance(value, str) and re.match(r"-?0x\d\.", value) else str(value)


def _tensors(source: Source, *, per_tensor: bool) -> list[str]:
    """Return sums by state and dtype, and with ``per_tensor`` a line per tensor."""
    sums: dict[str, list[int]] = {}
    lines = []
    for (state, name), (dtype, shape) in source.entries.items():
        row = f"{state:<24} {str(dtype).removeprefix('torch.'):<9}"
        one = (1, prod(shape), prod(shape) * dtype.itemsize)
        sums[row] = [a + b for a, b in zip(sums.get(row, (0, 0, 0)), one, strict=True)]
        lines.append(f"{row} {'x'.join(map(str, shape)) or 'scalar':<20} {name}")
    sums["total"] = [sum(column) for column in zip((0, 0, 0), *sums.values(), strict=True)]
    rows = [f"{'state':<24} {'dtype':<9} {'tensors':>8} {'elements':>15} {'bytes':>10}"]
    for row, (count, numel, nbytes) in sums.items():
        rows.append(f"{row:<34} {count:>8} {numel:>15,} {size(nbytes):>10}")
    return [*rows, "", *lines] if per_tensor else rows


def scan(path: Path) -> Counter[str]:
    """Count the names in opcodes of the pickles in a torch archive or bare stream ("": no name), without running them.

    Without names nothing can be called.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            pickles = (archive.read(name) for name in archive.namelist() if name.endswith(".pkl"))
            return sum(map(_disassembled, pickles), Counter[str]())
    with path.open("rb") as file:
        return _disassembled(file) if file.peek(1)[:1] == b"\x80" else Counter()


def _disassembled(stream: Any) -> Counter[str]:
    names = Counter[str]()
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            hidden = opcode.name == "STACK_GLOBAL" or opcode.name.startswith("EXT")
            plain = str(argument) if opcode.name in ("GLOBAL", "INST") else ""
            names["what its stack holds" if hidden else plain] += 1
    except Exception:  # it ends in the middle, or is something else that begins like a pickle
        return names if any(names) else Counter()
    return names


def unsafe(path: Path) -> list[str]:
    """Return the names in a file of torch that ``torch.load(weights_only=True)`` refuses."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception as error:  # whatever the file is: not one that can be opened so
        return [str(error).partition("\n")[0]]


def audit(args: Namespace) -> int:
    """Print what every file is; return 1 if loading would execute a pickle, or another program's file is not plain."""
    folder = located(Path(args.checkpoint), args.tag)
    stubs, odd, executed = 0, 0, 0
    complete = folders.is_complete(folder)
    data = read_manifest(folder).files if complete else {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() or p.is_symlink()):
        name, pickled = str(path.relative_to(folder)), scan(path) if path.is_file() else Counter[str]()
        if complete and name.endswith("_states.pt"):
            stubs += 1
            if pickled and (names := unsafe(path)):
                odd += 1
                say(f"NOT PLAIN: {name} names {', '.join(names[:6])}; do not open it without weights_only=True")
            continue
        if name == folders.MANIFEST:
            kind = "JSON with a checksum"
        elif name in data:  # never unpickled, but an archive in its place is no tensor file either
            kind = "a pickle where tensors should be" if pickled else "raw tensors with checksums"
        elif not complete:
            kind = "of DeepSpeed's layout"
        else:
            kind = "read only with allow_pickle" if name.startswith("pickled_client_state") else _UNREAD
        executed += pickled.total() if kind != _UNREAD else 0
        if pickled:
            kind += f"; names {', '.join(sorted(filter(None, pickled))[:6]) or 'nothing'}"
        nbytes = path.lstat().st_size
        say(f"{name:<44} {size(nbytes):>10}  {kind}; pickle opcodes: {pickled.total()}")
    if stubs:
        plain = f"{odd} NOT PLAIN" if odd else "plain values, loadable with weights_only=True"
        say(f"for other programs, never read here: {stubs} files, {plain}")
    say(f"pickle opcodes: {executed}")
    return 1 if executed or odd else 0
