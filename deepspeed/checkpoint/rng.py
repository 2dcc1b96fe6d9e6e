"""Random number generators of one rank, as plain values."""

import random
from typing import Any

import numpy as np
import torch

from deepspeed.device import get_accelerator


def capture_rng() -> dict[str, Any]:
    """State of Python's, numpy's (the global one) and torch's generators, and of the device's where there is one."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if get_accelerator().device_name() != "cpu":
        state["device"] = get_accelerator().get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """The inverse of ``capture_rng``; a device state is ignored where there is no device."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if "device" in state and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(state["device"])
