"""The device that these tests run on: what PyTorch finds here, a real one or the one that pretends (tests/pretend)."""

import pytest
import torch

_FOUND = torch.accelerator.current_accelerator(check_available=True)
NAME = _FOUND.type if _FOUND is not None else "cuda"
DEVICE = torch.get_device_module(NAME)
PRETENDS = hasattr(DEVICE, "pretends")
needs_device = pytest.mark.skipif(_FOUND is None, reason="needs an accelerator")


def needs_real(what: str) -> pytest.MarkDecorator:
    """Mark of a test that needs ``what`` of the device, which one that pretends has not."""
    return pytest.mark.skipif(PRETENDS, reason=f"needs {what}, which a device that pretends has not")
