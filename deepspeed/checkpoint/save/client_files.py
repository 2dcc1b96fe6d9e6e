"""Small files for programs that look for the names DeepSpeed uses, which nothing here reads, and the recovery script.

They hold plain values and small client state as far as ``torch.load(..., weights_only=True)`` opens it; no weights.
"""

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from deepspeed.checkpoint.format.folders import sync
from deepspeed.checkpoint.format.manifest import Key
from deepspeed.version import __version__

_SMALL = 16 << 20  # bytes of client state that may be in the folder twice
SCRIPT = "zero_to_fp32.py"
SCRIPT_TEXT = '''\
#!/usr/bin/env python3
"""Write the weights of a checkpoint in this folder as one fp32 state dict that plain PyTorch loads.

    python zero_to_fp32.py . out                          the newest checkpoint -> out/pytorch_model.bin
    python zero_to_fp32.py . out --tag global_step100 --safe_serialization --max_shard_size 2GB

Needs no process group and no accelerator, and holds one output shard in memory. See also: ds_checkpoint export --help
"""

import sys

from deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    sys.exit(main())
'''


def write_client_files(
    folder: Path,
    shapes: Mapping[Key, Any],
    facts: dict[str, Any],
    *,
    client_state: dict[str, Any],
    level: int,
    whole: bool,
    bf16: bool,
) -> None:
    """Write the stand-ins for DeepSpeed's files. ``shapes``: of all tensors; ``facts``: the manifest's; ``level``: ZeRO
    stage, for the sharded state; ``whole``: parameters are not sharded.
    """
    world = int(facts["world"]["size"])
    header = {
        **facts["engine"],
        "ds_version": __version__,
        "dp_world_size": world,
        "mp_world_size": 1,
        **names_and_shapes(shapes, facts["shared"]),
        "weights_are_in": "manifest.json",
    }
    sharded = {"zero_stage": level, "partition_count": world, "ds_version": __version__}
    optim = {"optimizer_state_dict": sharded, "ds_version": __version__}
    model, begin = "mp_rank_00_model_states.pt", "bf16_" if bf16 else ""
    names = [model] if whole else [f"zero_pp_rank_{rank}_{model}" for rank in range(world)]
    _write(folder, names, _loadable({**header, **copy_for_later(client_state)}) or _loadable(header))
    names = [f"{begin}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world if level else 0)]
    _write(folder, names, _loadable(optim))


def names_and_shapes(shapes: Mapping[Key, Any], shared: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries in DeepSpeed's files, and of its loader, about the tensors with these ``shapes``."""
    return {
        "buffer_names": [n for s, n in shapes if s == "buffer"],
        "param_shapes": [{n: torch.Size(shape) for (s, n), shape in shapes.items() if s == "master"}],
        "frozen_param_shapes": {n: torch.Size(shape) for (s, n), shape in shapes.items() if s == "param"},
        "shared_params": dict(shared),
    }


def copy_for_later(client_state: dict[str, Any]) -> dict[str, Any]:
    """Copy the part of ``client_state`` these files can hold; the caller's objects may change later."""
    content = _loadable(client_state)
    if content is not None:
        copied: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return copied
    kept: dict[str, Any] = {}
    for key, value in client_state.items():
        if type(value) is dict:
            kept[key] = copy_for_later(value)
        elif _loadable({key: value}) is not None:
            kept |= copy_for_later({key: value})
    return kept


def _loadable(value: dict[Any, Any]) -> bytes | None:
    """Serialize as a torch file that loads without running code; None when that is impossible, or it is large."""
    buffer = io.BytesIO()
    try:
        leaves = pytree.tree_leaves(value)  # of a view torch would write all that it is a view of
        wholes = [leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        sizes = [getattr(leaf, "nbytes", 0) for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if sum(wholes) + sum(sizes) > _SMALL:
            return None  # not even copied
        torch.save(value, buffer)
        if buffer.tell() > _SMALL:
            return None
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # whatever the user's own objects raise: these files do without them
        return None
    return buffer.getvalue()


def _write(folder: Path, names: list[str], content: bytes | None) -> None:
    """Write one file under all ``names``, one per rank; hard links where the filesystem has them."""
    assert content is not None
    for name in names:
        with contextlib.suppress(OSError):
            if name != names[0]:
                os.link(folder / names[0], folder / name)
                continue
        (folder / name).write_bytes(content)
        sync(folder / name)


def write_script(save_dir: Path) -> None:
    """Write the recovery script, executable, beside the checkpoints."""
    path, text = save_dir / SCRIPT, SCRIPT_TEXT.encode()
    if not path.is_file() or path.read_bytes() != text:
        path.write_bytes(text)
        path.chmod(0o755)
