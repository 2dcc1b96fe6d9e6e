"""``ds_checkpoint info`` and ``audit``: what a checkpoint holds, and what its files are."""

import pickletools
import zipfile
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.manifest import MANIFEST
from deepspeed.checkpoint.load.reader import read_manifest
from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.tool.common import opened, say, sized
from deepspeed.checkpoint.weights.weights import block_of, compute_dtype, open_facts, shared_names
from deepspeed.errors import CheckpointError

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


def _dtype(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _config_line(config: dict[str, Any]) -> str:
    zero = block_of(config, "zero_optimization")
    devices = {name: block_of(zero, name).get("device", "none") for name in ("offload_optimizer", "offload_param")}
    words = {"ZeRO": zero.get("stage", 0), **{name: device for name, device in devices.items() if device != "none"}}
    return _listed({**words, **{name: config[name] for name in _BATCH if config.get(name) is not None}})


def _lines(source: Source, *, tensors: bool) -> list[str]:
    facts = open_facts(source)
    try:
        facts = source.facts
    except CheckpointError as error:  # client state that would need pickle
        facts = {**{k: facts.get(k) for k in ("saved", "engine", "world", "config")}, "client_state": str(error)}
    optimizer, client, shared = facts.get("optimizer") or {}, facts.get("client_state"), shared_names(source)
    groups = optimizer.get("groups") or []
    rates = ", ".join(str(g["options"].get("lr")) for g in groups)
    world = (facts.get("world") or {}).get("size", "?")
    rows = {
        "checkpoint": source.path,
        "format": source.kind,
        "saved": _listed(facts.get("saved") or {}),
        "counters": _listed(facts.get("engine") or {}),
        "world": f"{world} ranks, trained in {_dtype(compute_dtype(facts))}",
        "config": facts.get("config") and _config_line(facts["config"]),
        "optimizer": optimizer and f"{optimizer.get('type') or 'not named'}, {len(groups)} groups, lr {rates}",
        **{name: facts.get(name) and str(facts[name])[:160] for name in ("lr_scheduler", "loss_scaler")},
        "client": ", ".join(map(str, client)) if isinstance(client, dict) else client,
        "tied": ", ".join(f"{alias} = {name}" for alias, name in shared.items()),
    }
    head = [f"{name:<11} {value}" for name, value in rows.items() if value]
    every = [(state, name, _dtype(d.dtype), d) for (state, name), d in source.entries.items()]
    sums: dict[tuple[str, str], list[int]] = {}
    for state, _, dtype, d in every:
        for row in ((state, dtype), ("total", "")):
            counts = sums.setdefault(row, [0, 0, 0])
            numel = prod(d.shape)
            counts[:] = counts[0] + 1, counts[1] + numel, counts[2] + numel * d.dtype.itemsize
    total = sums.pop(("total", ""), [0, 0, 0])
    head += ["", f"{'state':<24} {'dtype':<9} {'tensors':>8} {'elements':>15} {'bytes':>10}"]
    for (state, dtype), (count, numel, nbytes) in [*sums.items(), (("total", ""), total)]:
        head.append(f"{state:<24} {dtype:<9} {count:>8} {numel:>15,} {sized(nbytes):>10}")
    body = [f"{s:<24} {dtype:<9} {'x'.join(map(str, d.shape)) or 'scalar':<20} {n}" for s, n, dtype, d in every]
    return [*head, "", *body] if tensors else head


def run(path: Path, tag: str | None, *, tensors: bool) -> int:
    """Print what the checkpoint holds; 0."""
    with opened(path, tag) as source:
        for line in _lines(source, tensors=tensors):
            say(line)
    return 0


# -- audit -------------------------------------------------------------------------------------------------------------


class Pickled(NamedTuple):
    """Of one file: opcodes, and the globals it names, without which nothing can be called."""

    opcodes: int
    names: frozenset[str]

    def __str__(self) -> str:
        return f"names {', '.join(sorted(self.names)[:6]) or 'nothing'}"


def scan(path: Path) -> Pickled | None:
    """Every pickle in a torch archive or bare stream, disassembled and never run; None when there is none."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            each = [_disassembled(archive.read(name)) for name in archive.namelist() if name.endswith(".pkl")]
    else:
        with path.open("rb") as file:
            each = [_disassembled(file)] if file.peek(1)[:1] == b"\x80" else []
    opcodes = sum(p.opcodes for p in each)
    return Pickled(opcodes, frozenset[str]().union(*(p.names for p in each))) if opcodes else None


def _disassembled(stream: Any) -> Pickled:
    opcodes, names = 0, set[str]()
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            opcodes += 1
            if opcode.name in ("GLOBAL", "INST"):
                names.add(str(argument))
            elif opcode.name == "STACK_GLOBAL" or opcode.name.startswith("EXT"):
                names.add("what its stack holds")
    except Exception:  # it ends in the middle, or is something else that begins like a pickle
        opcodes = opcodes if names else 0
    return Pickled(opcodes, frozenset(names))


def unsafe(path: Path) -> list[str]:
    """The names in a file of torch that ``torch.load(weights_only=True)`` refuses."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception as error:  # whatever the file is: not one that can be opened so
        return [str(error).partition("\n")[0]]


def audit(folder: Path) -> int:
    """Print what every file is; 1 when loading would execute a pickle, or a file for other programs is not plain."""
    titles = {"read when loading": [], "read only with allow_pickle": [], "not read": []}  # type: dict[str, list[str]]
    stubs, odd, executed = 0, [], 0
    complete = folders.is_complete(folder)
    data = read_manifest(folder).files if complete else {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() or p.is_symlink()):
        name, pickled = str(path.relative_to(folder)), scan(path) if path.is_file() else None
        title = "read when loading"
        if not complete:
            what = "no pickle" if pickled is None else f"pickle in DeepSpeed's layout; {pickled}"
        elif name == MANIFEST:
            what = "JSON with a checksum"
        elif name in data:  # never unpickled, but an archive in its place is no tensor file either
            what = "raw tensors with checksums" if pickled is None else "a pickle where tensors should be"
        elif name.startswith("pickled_client_state"):
            title, what = "read only with allow_pickle", f"pickled client state; {pickled}"
        elif name.endswith("_states.pt"):
            stubs += 1
            if pickled is not None and (names := unsafe(path)):
                odd.append(
                    f"  {name}: NOT PLAIN: names {', '.join(names[:6])}; do not open it without weights_only=True"
                )
            continue
        else:
            title = "not read"
            what = "not part of the checkpoint, never read" if pickled is None else "holds a pickle, never read"
        opcodes = pickled.opcodes if pickled else 0
        executed += opcodes if title != "not read" else 0
        titles[title].append(f"  {name:<44} {sized(path.lstat().st_size):>10}  {what}; pickle opcodes: {opcodes}")
    for title, lines in titles.items():
        for line in [f"{title}:", *lines] if lines else []:
            say(line)
    if stubs:
        plain = f"{len(odd)} NOT PLAIN" if odd else "plain values, loadable with weights_only=True"
        say("\n".join([f"for other programs, never read here: {stubs} files, {plain}", *odd]))
    say(f"pickle opcodes: {executed}")
    return 1 if executed or odd else 0
