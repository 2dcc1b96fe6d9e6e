"""Attention around a ring on a real device: the blocks of one rank, by torch's flash kernel and beside it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed.comm.collectives import AxisGroup
from deepspeed.sequence import ring
from deepspeed.sequence.ring import RingMask, ring_attention
from tests.gpu.target import NAME, needs_device, needs_real

pytestmark = [pytest.mark.gpu, needs_device]
ALONE = AxisGroup(None, 1, 0, (0,), "none")
HALVES = [[range(32), range(32, 64)]]


def _to_itself(values: Tensor, out: Tensor, _: AxisGroup) -> Any:
    out.copy_(values)
    return SimpleNamespace(wait=lambda: None)


@needs_real("attention kernels")
@pytest.mark.parametrize("width", [64, 20])  # the kernel takes multiples of 8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_ring_attends_in_16_bits_as_torch(dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "start_shift", _to_itself)
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 64, width, device=NAME, dtype=dtype) for heads in (4, 2, 2, 4))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    narrow = [x.requires_grad_() for x in (q, k, v)]
    found = ring_attention(*narrow, ALONE, mask=RingMask(), runs=HALVES)
    expected.backward(grad.double())
    found.backward(grad)
    pairs = [(found.detach(), expected.detach()), *((a.grad, b.grad) for a, b in zip(narrow, wide, strict=True))]
    assert max(float((a - b).abs().max()) for a, b in pairs) < 0.04
