"""Small files for programs that look into a checkpoint folder by the names DeepSpeed uses. Nothing here reads them.

They hold plain values and, where it is small, the client state: ``torch.load(..., weights_only=True)`` opens them, so
what that refuses (paths, dates, namespaces) is not in them, and everything round it is. Neither are the weights: the
recovery script, ``ds_checkpoint export`` and ``deepspeed.utils.zero_to_fp32`` get those out.
"""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed.checkpoint.format.manifest import Manifest
from deepspeed.checkpoint.save.recovery_script import script_text
from deepspeed.version import __version__

_SMALL = 16 << 20  # bytes of client state that may be in the folder twice
SCRIPT = "zero_to_fp32.py"


def write_client_files(
    folder: Path, manifest: Manifest, client_state: dict[str, Any], *, level: int, whole: bool, bf16: bool
) -> None:
    """The stand-ins for DeepSpeed's files. ``level``: its number for what is sharded; ``whole``: parameters are not."""
    facts = manifest.facts
    world = int(facts["world"]["size"])
    header = {
        **facts["engine"],
        "ds_version": __version__,
        "dp_world_size": world,
        "mp_world_size": 1,
        "buffer_names": [n for s, n in manifest.entries if s == "buffer"],
        "param_shapes": [{n: torch.Size(e.shape) for (s, n), e in manifest.entries.items() if s == "master"}],
        "frozen_param_shapes": {n: torch.Size(e.shape) for (s, n), e in manifest.entries.items() if s == "param"},
        "shared_params": dict(facts["shared"]),
        "weights_are_in": "manifest.json",
    }
    content = _loadable({**header, **copy_for_later(client_state)}) or _loadable(header)
    assert content is not None
    names = (
        ["mp_rank_00_model_states.pt"]
        if whole
        else [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(world)]
    )
    _write(folder, names, content)
    optim = {
        "optimizer_state_dict": {"zero_stage": level, "partition_count": world, "ds_version": __version__},
        "ds_version": __version__,
    }
    content = _loadable(optim)
    assert content is not None
    begin = "bf16_" if bf16 else ""
    _write(
        folder,
        [f"{begin}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world if level else 0)],
        content,
    )


def copy_for_later(client_state: dict[str, Any]) -> dict[str, Any]:
    """What these files would hold of ``client_state``, apart from the caller's own objects: a background save writes it
    much later.
    """
    content = _loadable(client_state)
    if content is not None:
        return _reloaded(content)
    found: dict[str, Any] = {}
    for key, value in client_state.items():
        content = _loadable({key: value})
        if content is not None:
            found |= _reloaded(content)
        elif type(value) is dict:
            found[key] = copy_for_later(value)
    return found


def _reloaded(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return found


def _loadable(value: dict[Any, Any]) -> bytes | None:
    """As a file of torch that opens without running code; None when that is not possible, or it is large."""
    buffer = io.BytesIO()
    try:
        if _size(value) > _SMALL:
            return None
        torch.save(value, buffer)
        if buffer.tell() > _SMALL:
            return None
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # whatever the user's own objects raise: these files do without them
        return None
    return buffer.getvalue()


def _size(value: Any) -> int:
    """Bytes of what may be large in it: such a state is not copied only to be refused."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, dict):
        return sum(_size(item) for item in value.values())
    return sum(_size(item) for item in value) if isinstance(value, (list, tuple)) else 0


def _write(folder: Path, names: list[str], content: bytes) -> None:
    """One file under all ``names`` where the filesystem has links, since they are as many as ranks."""
    for name in names:
        with contextlib.suppress(OSError):
            if name != names[0]:
                os.link(folder / names[0], folder / name)
                continue
        with (folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def write_script(save_dir: Path) -> None:
    """The recovery script beside the checkpoints, executable."""
    path = save_dir / SCRIPT
    text = script_text().encode()
    if not path.is_file() or path.read_bytes() != text:
        path.write_bytes(text)
        path.chmod(0o755)
