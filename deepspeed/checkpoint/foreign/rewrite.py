"""Any checkpoint that can be opened, written as one of this package's; tensors pass through in pieces."""

import shutil
from pathlib import Path
from typing import Any

import torch

from deepspeed.accelerator.device import DTYPES
from deepspeed.checkpoint.foreign.legacy import ReferenceSource
from deepspeed.checkpoint.foreign.weights import Progress, block_of, compute_dtype, stream
from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.files import ChunkWriter
from deepspeed.checkpoint.format.manifest import Entry, Manifest
from deepspeed.checkpoint.format.plain import Collected
from deepspeed.checkpoint.load.compare import in_memory
from deepspeed.checkpoint.load.source import Key, Source
from deepspeed.checkpoint.save.client_files import write_client_files, write_script
from deepspeed.checkpoint.save.collect import group_rows, in_rows, pack_scalar
from deepspeed.errors import CheckpointError
from deepspeed.zero.regions import Span

_DATA = "rank_00000.bin"


def _facts_of(source: Source, plain: Collected) -> dict[str, Any]:
    """Convert the facts of ``source`` to a manifest's facts. Only the first rank has state of its own."""
    facts, optimizer = source.facts, None
    size = int((facts.get("world") or {}).get("size") or 1)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == compute_dtype(facts))
    first = {"rng": None, "data": None, "client_state": plain.add(facts.get("client_state") or {}, "client_state")}
    if groups := (facts.get("optimizer") or {}).get("groups"):
        numbers = (facts["optimizer"].get("scalars") or {}).items()
        optimizer = {
            "type": facts["optimizer"].get("type"),
            "groups": group_rows(((g["names"], g["options"]) for g in groups), plain, "optimizer"),
            "scalars": in_rows((name, {k: pack_scalar(v) for k, v in values.items()}) for name, values in numbers),
        }
    return {
        "saved": {**(facts.get("saved") or {}), "imported_from": source.kind},
        "world": {"size": size, "compute_dtype": dtype},
        "optimizer": optimizer,
        "ranks": [first, *({"rng": None, "data": None} for _ in range(size - 1))],
        **{name: facts.get(name) or {} for name in ("engine", "shared", "config")},
        **{name: plain.add(facts.get(name), name) for name in ("lr_scheduler", "loss_scaler")},
        "extra_state": plain.add(facts.get("extra_state") or {}, "extra_state"),
    }


def write_checkpoint(
    source: Source, save_dir: Path, tag: str, *, latest: bool = True, advance: Progress = lambda _bytes: None
) -> Path:
    """Write ``source`` as checkpoint ``tag`` of ``save_dir``, whole or not at all; with ``latest``, update that file.

    Holds a piece of one tensor, and the tensors of the client state. Raises CheckpointError, also when its optimizer
    state has no names; PlainStateError (client state that needs pickle); OSError.
    """
    folders.check_tag(tag)
    if isinstance(source, ReferenceSource) and source.unnamed:
        raise CheckpointError(
            f"{source.path} numbers its optimizer state ({source.unnamed[0]}, and {len(source.unnamed) - 1} more), and "
            "nothing in it tells the names; load it with engine.load_checkpoint, which knows them, and save it"
        )
    folder = folders.begin(save_dir, tag)
    try:
        plain, facts, entries = Collected(), source.facts, dict[Key, Entry]()
        described = _facts_of(source, plain)
        streams = {key: stream(source, key) for key in source.entries if key[0] != "plain"}
        streams |= {("plain", name): in_memory(name, tensor) for name, tensor in plain.tensors.items()}
        with ChunkWriter(folder / _DATA) as writer:
            for values in streams.values():
                writer.append(values.chunks(), Span(0, values.numel))
                advance(values.nbytes)
            boxes = writer.close()
        for (key, values), box in zip(streams.items(), boxes, strict=True):
            entries[key] = Entry(*key, values.dtype, values.shape, (box,))
        manifest = Manifest(entries, {_DATA: (folder / _DATA).stat().st_size}, described)
        level = int(block_of(facts.get("config"), "zero_optimization").get("stage") or 0)
        bf16 = compute_dtype(facts) == torch.bfloat16
        shapes, client_state = {key: entry.shape for key, entry in entries.items()}, facts.get("client_state") or {}
        kinds: Any = {"level": level, "whole": level < 3, "bf16": bf16}
        write_client_files(folder, shapes, described, client_state=client_state, **kinds)
        folders.write_atomically(folder / folders.MANIFEST, manifest.to_bytes(crc32c))
        final = folders.publish(folder, tag)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if latest:
        folders.write_latest(save_dir, tag)
        write_script(save_dir)
    return final
