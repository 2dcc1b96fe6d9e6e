"""The update kernels are torch ops: their schemas are true, and compilers can trace them."""

import pytest
import torch

from deepspeed.optim import host, registered

COUNT = 1003


def _tensors(*dtypes: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(COUNT, generator=draw).abs_().to(dtype) for dtype in dtypes]


F32, BF16 = torch.float32, torch.bfloat16
CALLS = {
    "cpu_adam": (registered.cpu_adam, (F32, BF16, F32, F32), (3, 0.01, 0.9, 0.99, 1e-8, 0.1, True, True, 0.5)),
    "cpu_adagrad": (registered.cpu_adagrad, (F32, BF16, F32), (0.01, 1e-8, 0.1, 0.5)),
    "cpu_lion": (registered.cpu_lion, (F32, BF16, F32), (0.01, 0.9, 0.99, 0.1, 0.5)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("with_out", [True, False])
def test_opcheck(name: str, *, with_out: bool) -> None:
    op, dtypes, numbers = CALLS[name]
    out = torch.empty(COUNT, dtype=BF16) if with_out else None
    torch.library.opcheck(op, (*_tensors(*dtypes), out, *numbers))


@pytest.mark.parametrize("name", CALLS)
def test_plain_torch_does_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, dtypes, numbers = CALLS[name]
    ours, theirs = _tensors(*dtypes), _tensors(*dtypes)
    first, second = torch.empty(COUNT, dtype=BF16), torch.empty(COUNT, dtype=BF16)
    op(*ours, first, *numbers)
    monkeypatch.setattr(host, "usable", lambda *_: False)
    op(*theirs, second, *numbers)
    for a, b in zip([*ours, first], [*theirs, second], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype is BF16 else 1e-5, atol=1e-6)
    assert torch.equal(first, ours[0].to(BF16))


def test_a_compiled_function_may_call_them() -> None:
    eager, traced = _tensors(F32, BF16, F32), _tensors(F32, BF16, F32)

    def update(master: torch.Tensor, grad: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
        torch.ops.deepspeed.cpu_lion(master, grad, moment, None, 0.01, 0.9, 0.99, 0.1, 1.0)
        return master * 2

    expected = update(*eager)
    found = torch.compile(update, backend="aot_eager", fullgraph=True)(*traced)
    assert torch.equal(found, expected) and torch.equal(traced[2], eager[2])


def test_every_op_has_a_meta_function() -> None:
    for op in registered.OPS:
        assert op._opoverload is not None and op._opoverload._schema.is_mutable
