"""Any checkpoint that can be opened, written as one of this package's; tensors pass through in pieces, without a
process group.
"""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.files import ChunkWriter
from deepspeed.checkpoint.format.manifest import MANIFEST, Box, Entry, Key, Manifest
from deepspeed.checkpoint.format.plain import Collected
from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.save.client_files import write_client_files, write_script
from deepspeed.checkpoint.save.collect import in_rows, pack_scalar
from deepspeed.checkpoint.weights.weight_files import Progress
from deepspeed.checkpoint.weights.weights import COMPUTE_DTYPES, compute_dtype, stream

_DATA = "rank_00000.bin"


def _facts_of(source: Source, plain: Collected) -> dict[str, Any]:
    """The manifest's facts for what ``source`` says of itself. Ranks other than the first have no state of their own
    there.
    """
    facts = source.facts
    size = int((facts.get("world") or {}).get("size") or 1)
    client = plain.add(facts.get("client_state") or {}, "client_state")
    return {
        "saved": {**(facts.get("saved") or {}), "imported_from": source.kind},
        "world": {
            "size": size,
            "compute_dtype": next(n for n, d in COMPUTE_DTYPES.items() if d == compute_dtype(facts)),
        },
        "engine": facts.get("engine") or {},
        "shared": facts.get("shared") or {},
        "optimizer": _optimizer_facts(facts.get("optimizer") or {}, plain),
        "lr_scheduler": plain.add(facts.get("lr_scheduler"), "lr_scheduler"),
        "loss_scaler": plain.add(facts.get("loss_scaler"), "loss_scaler"),
        "extra_state": plain.add(facts.get("extra_state") or {}, "extra_state"),
        "config": facts.get("config") or {},
        "ranks": [
            {"rng": None, "data": None, **({"client_state": client} if rank == 0 else {})} for rank in range(size)
        ],
    }


def _optimizer_facts(facts: dict[str, Any], plain: Collected) -> dict[str, Any] | None:
    if not facts.get("groups"):
        return None
    groups = [
        {"names": list(g["names"]), "options": plain.add(g["options"], f"optimizer/{i}")}
        for i, g in enumerate(facts["groups"])
    ]
    scalars = (facts.get("scalars") or {}).items()
    rows = in_rows((name, {slot: pack_scalar(value) for slot, value in values.items()}) for name, values in scalars)
    return {"type": facts.get("type"), "groups": groups, "scalars": rows, "odd": None}


def write_source(source: Source, folder: Path, *, told: Progress = lambda _bytes: None) -> Manifest:
    """Fill the folder ``folder`` with the tensors and facts of ``source``; the manifest, which is not written yet.

    Holds a piece of one tensor, and the tensors of the client state. Raises CheckpointError.
    """
    plain = Collected()
    facts = _facts_of(source, plain)
    heads: list[tuple[Key, torch.dtype, tuple[int, ...], int]] = []
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(ChunkWriter(folder / _DATA))
        for key, described in source.entries.items():
            if key[0] == "plain":
                continue
            values = stream(source, key)
            writer.append(values.chunks())
            told(values.nbytes)
            heads.append((key, described.dtype, described.shape, values.numel))
        for name, tensor in plain.tensors.items():
            writer.append(tensor)
            heads.append((("plain", name), tensor.dtype, tuple(tensor.shape), tensor.numel()))
        places = writer.close()
    entries = {
        key: Entry(*key, dtype, shape, (Box(_DATA, place.offset, place.extent, 0, numel, tuple(place.crcs)),))
        for (key, dtype, shape, numel), place in zip(heads, places, strict=True)
    }
    return Manifest(entries, {_DATA: (folder / _DATA).stat().st_size}, facts)


def write_checkpoint(
    source: Source, save_dir: Path, tag: str, *, latest: bool = True, told: Progress = lambda _bytes: None
) -> Path:
    """Make ``source`` the checkpoint ``tag`` of ``save_dir``, with ``latest`` the one it names. Appears whole or not at
    all.

    Raises CheckpointError, PlainStateError (client state that needs pickle), OSError.
    """
    folders.check_tag(tag)
    folder = folders.begin(save_dir, tag)
    try:
        manifest = write_source(source, folder, told=told)
        facts = source.facts
        zero = (facts.get("config") or {}).get("zero_optimization")
        level = int((zero or {}).get("stage") or 0) if isinstance(zero, dict) else 0
        bf16 = compute_dtype(facts) == torch.bfloat16
        write_client_files(folder, manifest, facts.get("client_state") or {}, level=level, whole=level < 3, bf16=bf16)
        folders.write_atomically(folder / MANIFEST, manifest.to_bytes(crc32c))
        final = folders.publish(folder, tag)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if latest:
        folders.write_latest(save_dir, tag)
        write_script(save_dir)
    return final
