"""Attention around a ring of ranks equals attention on one: outputs and gradients of queries, keys and values."""

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.sequence import ring
from deepspeed.sequence.layout import runs_of
from deepspeed.sequence.ring import RingBlock, RingMask, ring_attention
from tests.harness.pool import RankPool

pytestmark = pytest.mark.timeout(120)
BATCH, ROWS, WIDTH = 2, 6, 8
CELLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "both directions": {"causal": False},
    "grouped heads": {"kv": 2},
    "one head": {"heads": 1, "kv": 1},
    "documents": {"documents": True},
    "documents, grouped heads": {"documents": True, "kv": 1},
    "window of a part": {"window": 5},
    "window of more than a part": {"window": 9},
    "window and documents": {"window": 9, "documents": True},
    "parts of different lengths": {"uneven": True},
    "parts of different lengths, window and documents": {"uneven": True, "window": 9, "documents": True},
    "tiles": {"documents": True, "tile": 100},
    "sixteen bits": {"dtype": torch.bfloat16},
    "sixteen bits, documents": {"dtype": torch.bfloat16, "documents": True},
    "the kernel of devices": {"dtype": torch.bfloat16, "kernel": True, "kv": 2},
    "the kernel of devices, windows": {"dtype": torch.bfloat16, "kernel": True, "window": 9},
}


class DenseKernel:
    """The flash kernel of devices, computed by that of the CPU."""

    def _scaled_dot_product_flash_attention(self, *args: Any, scale: float) -> tuple[Tensor, ...]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, scale=scale)

    def _scaled_dot_product_flash_attention_backward(self, *args: Any, scale: float) -> tuple[Tensor, ...]:
        *tensors, queries, keys, _, _, dropout, is_causal, _, _ = args
        assert queries is None and keys is None, "the kernel would take the tensors for packed sequences"
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(*tensors, dropout, is_causal, scale=scale)


def _whole(q: Tensor, k: Tensor, v: Tensor, mask: RingMask) -> Tensor:
    """Attention by torch on one rank."""
    length = q.shape[2]
    back = torch.arange(length)[:, None] - torch.arange(length)
    seen = (back >= 0 if mask.causal else back == back)[None]
    if mask.window is not None:
        seen = seen & (back < mask.window)
    if mask.documents is not None:
        seen = seen & (mask.documents[:, :, None] == mask.documents[:, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)


def errors(options: dict[str, Any]) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    job = plain_mesh("gloo").job
    group = AxisGroup(job.pg, job.size, job.index, job.ranks, job.backend)
    heads, kv, dtype = options.get("heads", 4), options.get("kv", options.get("heads", 4)), options.get("dtype")
    torch.manual_seed(0)
    shapes = [(BATCH, h, world * ROWS, WIDTH) for h in (heads, kv, kv, heads)]
    q, k, v, grad = (torch.randn(shape).to(dtype or torch.float32) for shape in shapes)
    documents = torch.randint(0, 2, (BATCH, world * ROWS)).cumsum(1) if options.get("documents") else None
    mask = RingMask(options.get("causal", True), documents, options.get("window"))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = _whole(*wide, mask)
    expected.backward(grad.double())
    edges = [0] + [ROWS * (r + 1) - (bool(options.get("uneven")) and r < world - 1) for r in range(world)]
    runs = runs_of([b - a for a, b in pairwise(edges)], from_ends=options["from_ends"])
    mine = [token for run in runs[rank] for token in run]
    parts = [x[:, :, mine].contiguous().requires_grad_() for x in (q, k, v)]
    with (
        mock.patch.object(ring, "_TILE", options.get("tile", ring._TILE)),
        mock.patch.object(ring, "_aten", DenseKernel()),
        mock.patch.object(RingBlock, "_fused", lambda block, _: block._plain and "kernel" in options),
    ):
        out = ring_attention(*parts, group, mask=mask, runs=runs)
        out.backward(grad[:, :, mine])
    pairs = [(out.detach(), expected.detach()), *((p.grad, w.grad) for p, w in zip(parts, wide, strict=True))]
    return [float((a - b[:, :, mine]).abs().max()) for a, b in pairs if a is not None and b is not None]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("cell", CELLS)
def test_a_ring_attends_as_one_rank(cell: str, world: int, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    for from_ends in (False, True):
        for found in pool.run(errors, {**CELLS[cell], "from_ends": from_ends}):
            assert len(found) == 4 and max(found) < (0.04 if "dtype" in CELLS[cell] else 2e-6), (from_ends, found)


@pytest.mark.parametrize("width", [64, 20, 264])
def test_a_block_takes_the_kernel_of_devices_for_widths_that_it_has(width: int) -> None:
    block, kind = RingBlock(RingMask(), range(4), range(4), 1.0), {"dtype": torch.bfloat16, "device": "meta"}
    q, k, v = (torch.empty(1, 2, 4, width, **kind) for _ in range(3))
    assert block._fused(q) is (width == 64)
    out, total = block.forward(q, k, v)
    parts = block.backward(torch.empty_like(q), (q, k, v), out.to(q.dtype), total)
    assert [part.shape for part in parts] == [q.shape] * 3


@pytest.mark.parametrize("has", [True, False])
def test_a_block_takes_no_kernel_that_a_gpu_or_torch_has_not(*, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "can_use_flash_attention", lambda _: has)
    with FakeTensorMode():
        q = torch.empty(1, 2, 4, 64, dtype=torch.float16, device="cuda")
        assert RingBlock(RingMask(), range(4), range(4), 1.0)._fused(q) is has
