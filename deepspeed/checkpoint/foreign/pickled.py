"""Client state that cannot be stored without pickle: a file of its own, written and read only when the caller asked for
it.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.folders import write_atomically
from deepspeed.errors import CheckpointError, PlainStateError

_NAME = "pickled_client_state_{:05d}.pt"


def save_pickled(folder: Path, rank: int, objects: dict[str, Any]) -> dict[str, Any]:
    """Write ``objects`` by path; what ``load_pickled`` needs to know. Raises PlainStateError for what cannot even be
    pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(objects, buffer)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise PlainStateError(f"client state cannot be pickled either ({', '.join(objects)}): {error}") from error
    content = buffer.getvalue()
    write_atomically(folder / _NAME.format(rank), content)
    return {
        "file": _NAME.format(rank),
        "nbytes": len(content),
        "crc32c": f"{crc32c(content):08x}",
        "paths": sorted(objects),
    }


def load_pickled(folder: Path, known: dict[str, Any], *, allow: bool) -> dict[str, Any]:
    """The objects by path. Unpickling runs code from the file, so it needs ``allow``. Raises CheckpointError."""
    path = folder / str(known["file"])
    if not allow:
        raise CheckpointError(
            f"the client state of {folder} has pickled objects ({', '.join(known['paths'][:8])}) in "
            f"{path.name}, and reading them can run "
            'any code; set "checkpoint": {"allow_pickle": true} if you trust whoever wrote it'
        )
    if path.name != known["file"] or not path.is_file():
        raise CheckpointError(f"{path} is missing")
    content = path.read_bytes()
    if len(content) != known["nbytes"] or f"{crc32c(content):08x}" != known["crc32c"]:
        raise CheckpointError(f"{path} is damaged: its checksum does not match, so it was not unpickled")
    found: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
    return found
