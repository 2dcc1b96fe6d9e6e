"""Client state that only pickle can hold: a file of its own, written and read when the configuration allows it."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.folders import write_atomically
from deepspeed.errors import CheckpointError, PlainStateError


def save_pickled(folder: Path, rank: int, objects: dict[str, Any]) -> dict[str, Any]:
    """Write ``objects`` by path; what ``load_pickled`` needs to know. Raises PlainStateError where that fails."""
    buffer = io.BytesIO()
    try:
        torch.save(objects, buffer)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise PlainStateError(f"client state cannot be pickled either ({', '.join(objects)}): {error}") from error
    content, name = buffer.getvalue(), f"pickled_client_state_{rank:05d}.pt"
    write_atomically(folder / name, content)
    return {"file": name, "nbytes": len(content), "crc32c": f"{crc32c(content):08x}", "paths": sorted(objects)}


def checked(folder: Path, known: dict[str, Any]) -> bytes:
    """The file as it was written, not unpickled. Raises CheckpointError."""
    path = folder / Path(str(known["file"])).name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; it holds pickled client state")
    content = path.read_bytes()
    if len(content) != known["nbytes"] or f"{crc32c(content):08x}" != known["crc32c"]:
        raise CheckpointError(f"{path} is damaged: its checksum does not match, so it was not unpickled")
    return content


def load_pickled(folder: Path, known: dict[str, Any], *, allow: bool) -> dict[str, Any]:
    """The objects by path. Unpickling runs code from the file, so it needs ``allow``. Raises CheckpointError."""
    if not allow:
        raise CheckpointError(
            f"the client state of {folder} has pickled objects ({', '.join(known['paths'][:8])}) in {known['file']}; "
            'reading them can run any code; set "checkpoint": {"allow_pickle": true} if you trust whoever wrote it'
        )
    return dict(torch.load(io.BytesIO(checked(folder, known)), map_location="cpu", weights_only=False))
