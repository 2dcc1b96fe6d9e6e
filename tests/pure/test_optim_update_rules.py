"""Update rules: every optimizer of our own equals a reference written from its formula, element by element or in
numpy-like torch.
"""

import copy
import io
import math

import pytest
import torch

from deepspeed.errors import NotYetError, OptimizerConfigError, UsageError
from deepspeed.optim import host
from deepspeed.optim.muon import MuonWithAuxAdam, mark_muon_parameters, orthogonalize
from deepspeed.optim.rules import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
)
from tests.harness.plain_optim import PlainLion
from tests.harness.rows import for_each

STEPS = 5


def make(shape=(3, 4), dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    start = torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)
    grads = [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for _ in range(STEPS)]
    return start, grads


def run(optimizer, param, grads):
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return param.detach()


def trained(cls, start, grads, **settings):
    """Return the parameter that an optimizer of this class makes of ``start``."""
    param = torch.nn.Parameter(start.clone())
    return run(cls([param], **settings), param, grads)


def reference_adam(start, grads, *, lr, betas, eps, wd, decoupled, bias_correction):
    """The formula for single numbers."""
    out = []
    series = torch.stack(grads).flatten(1).T.tolist()
    for p, gs in zip(start.flatten().tolist(), series, strict=True):
        m = v = 0.0
        for t, g in enumerate(gs, 1):
            if not decoupled:
                g = g + wd * p
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g * g
            c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if bias_correction else (1.0, 1.0)
            update = (m / c1) / (math.sqrt(v / c2) + eps)
            if decoupled:
                update += wd * p
            p -= lr * update
        out.append(p)
    return torch.tensor(out, dtype=torch.float64).view_as(start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_follows_the_formula(decoupled, bias_correction, dtype):
    """In fp32 as well: that is what the native kernels take."""
    start, grads = make(dtype=dtype)
    close = {"rtol": 1e-9, "atol": 1e-11} if dtype is torch.float64 else {"rtol": 1e-6, "atol": 1e-6}
    hyper = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}
    expected = reference_adam(start, grads, wd=0.1, decoupled=decoupled, bias_correction=bias_correction, **hyper)
    hyper |= {"weight_decay": 0.1, "bias_correction": bias_correction}
    for cls, flag in ((FusedAdam, "adam_w_mode"), (DeepSpeedCPUAdam, "adamw_mode")):
        found = trained(cls, start, grads, **hyper, **{flag: decoupled})
        torch.testing.assert_close(found.double(), expected, **close)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs_adam(decoupled, native, monkeypatch):
    """Bitwise where torch does the work; our kernel fuses other multiplications and differs in the last places."""
    if not native:
        monkeypatch.setattr(host, "usable", lambda *_: False)
    (start, grads), hyper = make(dtype=torch.float32), {"lr": 0.02, "weight_decay": 0.1}
    theirs = trained(torch.optim.Adam, start, grads, **hyper, fused=True, decoupled_weight_decay=decoupled)
    ours = trained(FusedAdam, start, grads, **hyper, adam_w_mode=decoupled)
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if native else 0, atol=1e-6 if native else 0)


def test_adam_uses_the_fused_kernel_only_where_it_exists():
    floating = FusedAdam([torch.nn.Parameter(torch.zeros(2))])
    assert floating.param_groups[0]["fused"] is True
    complex_param = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    other = FusedAdam([complex_param])
    assert not other.param_groups[0]["fused"]
    run(other, complex_param, [torch.ones(2, dtype=torch.complex64)])


def across(tensor):
    """The same values, in memory column by column."""
    return tensor.T.contiguous().T


@for_each("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_adam_takes_gradients_and_moments_of_any_strides(cls):
    start, grads = make(dtype=torch.float32)
    wanted = trained(cls, start, grads, lr=0.1)
    torch.testing.assert_close(trained(cls, start, [across(grad) for grad in grads], lr=0.1), wanted)
    torch.testing.assert_close(trained(cls, across(start), grads, lr=0.1), wanted)
    param = torch.nn.Parameter(start.clone())
    first, second = cls([param], lr=0.1), cls([param], lr=0.1)
    run(first, param, grads[:2])
    saved = first.state_dict()
    saved["state"][0] = {key: across(value) if value.dim() else value for key, value in saved["state"][0].items()}
    second.load_state_dict(saved)
    torch.testing.assert_close(run(second, param, grads[2:]), wanted)


def test_adam_empty_shard_and_missing_gradient():
    empty, idle, live = (torch.nn.Parameter(torch.zeros(n)) for n in (0, 3, 3))
    opt = FusedAdam([empty, idle, live])
    empty.grad, live.grad = torch.zeros(0), torch.ones(3)
    opt.step()
    assert idle not in opt.state and torch.equal(idle.detach(), torch.zeros(3)) and bool((live.detach() < 0).all())


def test_amsgrad_is_refused_also_in_a_group():
    for cls in (FusedAdam, DeepSpeedCPUAdam, FusedLamb, DeepSpeedCPUAdagrad):
        with pytest.raises(RuntimeError, match="amsgrad"):
            cls([torch.nn.Parameter(torch.zeros(2))], amsgrad=True)
    groups = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], amsgrad=True).param_groups
    with pytest.raises(RuntimeError, match="group 0"):
        DeepSpeedCPUAdam(groups)


@for_each("cls", [DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad])
def test_host_classes_take_over_groups_and_the_kwargs_clients_send(cls):
    weight, bias = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [weight], "weight_decay": 0.5, "lr": 0.3}, {"params": [bias], "weight_decay": 0.0}]
    source = torch.optim.AdamW(groups, lr=0.1)
    opt = cls(source.param_groups, lr=0.1, weight_decay=0.01, adamw_mode=True)
    assert [(g["lr"], g["weight_decay"]) for g in opt.param_groups] == [(0.3, 0.5), (0.1, 0.0)]
    weight.grad, bias.grad = torch.zeros(2), torch.zeros(2)
    opt.step()
    assert torch.equal(bias.detach(), torch.ones(2))
    if cls is not DeepSpeedCPUAdagrad:
        torch.testing.assert_close(weight.detach(), torch.full((2,), 1 - 0.3 * 0.5))


@for_each("cls", [DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad])
def test_host_classes_refuse_device_tensors(cls):
    param = torch.nn.Parameter(torch.ones(2, device="meta"))
    opt = cls([param])
    param.grad = torch.ones(2, device="meta")
    with pytest.raises(AssertionError, match="host memory"):
        opt.step()


def test_set_grad_none():
    for cls in (FusedAdam, FusedLion):
        param = torch.nn.Parameter(torch.ones(2))
        for flag in (True, False):
            opt = cls([param], set_grad_none=flag)
            param.grad = torch.ones(2)
            opt.zero_grad()
            assert (param.grad is None) is flag


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lion_follows_the_formula_and_moves_nothing_without_a_signal(dtype):
    (start, grads), hyper = make(dtype=dtype), {"lr": 0.01, "betas": (0.7, 0.9), "weight_decay": 0.2}
    expected = trained(PlainLion, start.double(), [grad.double() for grad in grads], **hyper)
    close = 1e-6 if dtype is torch.float32 else 1e-9
    for cls in (FusedLion, DeepSpeedCPULion):
        torch.testing.assert_close(trained(cls, start, grads, **hyper).double(), expected, rtol=close, atol=close)
    assert torch.equal(trained(FusedLion, start, [torch.zeros_like(start)], lr=0.1), start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adagrad_equals_torch_and_creates_state_late(dtype):
    (start, grads), hyper = make(dtype=dtype), {"lr": 0.1, "weight_decay": 0.3}
    assert not DeepSpeedCPUAdagrad([torch.nn.Parameter(start)], **hyper).state
    close = 1e-6 if dtype is torch.float32 else 1e-12
    ours, theirs = (trained(cls, start, grads, **hyper) for cls in (DeepSpeedCPUAdagrad, torch.optim.Adagrad))
    torch.testing.assert_close(ours, theirs, rtol=close, atol=close)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_follows_the_formula(inside, bias_correction):
    start, grads = make()
    lr, (b1, b2), eps, wd, low, high = 0.05, (0.8, 0.9), 1e-3, 0.1, 0.05, 2.0
    param = torch.nn.Parameter(start.clone())
    settings = {"betas": (b1, b2), "eps": eps, "weight_decay": wd, "min_coeff": low, "max_coeff": high}
    opt = FusedLamb([param], lr, bias_correction, eps_inside_sqrt=inside, **settings)
    assert opt.get_lamb_coeffs() == []
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        c1, c2 = (1 - b1**t, 1 - b2**t) if bias_correction else (1, 1)
        root = torch.sqrt(v / c2 + eps) if inside else torch.sqrt(v / c2) + eps
        u = (m / c1) / root + wd * p
        ratio = min(max((p.norm() / u.norm()).item(), low), high)
        p = p - lr * ratio * u
        run(opt, param, [g])
        assert opt.get_lamb_coeffs() == [pytest.approx(ratio)]
    torch.testing.assert_close(param.detach(), p)


def test_lamb_ratio_is_clamped_and_one_for_zero_norms():
    zero, large, still = (torch.nn.Parameter(torch.full((4,), value)) for value in (0.0, 1e6, 1.0))
    opt = FusedLamb([{"params": [zero, large]}, {"params": [still]}])
    for param in (zero, large):
        param.grad = torch.ones(4)
    still.grad = torch.zeros(4)
    opt.step()
    assert opt.get_lamb_coeffs() == [1.0, 10.0, 1.0]


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (2, 5, 7)])
def test_newton_schulz_is_the_polynomial_of_the_singular_values(shape, method):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / (torch.linalg.vector_norm(matrix, dim=(-2, -1)).unsqueeze(-1) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalize(matrix, method), u @ (s.unsqueeze(-1) * vh), rtol=1e-4, atol=1e-4)


def reference_muon(p, grads, *, lr, mu, wd):
    m = torch.zeros_like(p)
    for g in grads:
        m = mu * m + (1 - mu) * g
        u = (1 - mu) * g + mu * m
        flat = u.reshape(u.shape[0], -1) if u.ndim == 4 else u
        tall = flat.shape[0] > flat.shape[1]
        x = flat.T if tall else flat
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = (x.T if tall else x).reshape(g.shape) * max(1.0, g.shape[-2] / g.shape[-1]) ** 0.5
        p = p * (1 - lr * wd) - lr * x
    return p


@pytest.mark.parametrize("shape", [(8, 4), (4, 8), (4, 2, 3, 3)])
def test_muon_follows_the_formula(shape):
    start, grads = make(shape)
    found = trained(MuonWithAuxAdam, start, grads, lr=0.1, momentum=0.9, weight_decay=0.2)
    torch.testing.assert_close(found, reference_muon(start, grads, lr=0.1, mu=0.9, wd=0.2), rtol=1e-4, atol=1e-4)


def test_muon_splits_every_group_and_keeps_its_settings():
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(5, 4), "fc": torch.nn.Linear(4, 4), "lm_head": torch.nn.Linear(4, 5, bias=False)}
    )
    mark_muon_parameters(model.named_parameters())
    first = {"params": [model["fc"].weight, model["fc"].bias], "weight_decay": 0.3, "tag": "first"}
    second = {"params": [model["embed"].weight, model["lm_head"].weight], "lr": 7.0}
    opt = MuonWithAuxAdam([first, second], muon_lr=0.5, weight_decay=0.1)
    seen = [(g["use_muon"], g["lr"], g["weight_decay"], g.get("tag"), len(g["params"])) for g in opt.param_groups]
    assert seen == [(True, 0.5, 0.3, "first", 1), (False, 3e-4, 0.3, "first", 1), (False, 7.0, 0.1, None, 2)]
    named = MuonWithAuxAdam(list(torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4)}).named_parameters()))
    assert [g["use_muon"] for g in named.param_groups] == [False]


def test_muon_auxiliary_half_is_adam_with_decoupled_decay():
    start, grads = make((6,))
    found = trained(MuonWithAuxAdam, start, grads, adam_lr=0.01, weight_decay=0.1)
    words = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-10, "wd": 0.1}
    expected = reference_adam(start, grads, **words, decoupled=True, bias_correction=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_muon_keeps_its_momentum_on_a_bad_gradient_and_refuses_flat_tensors():
    param = torch.nn.Parameter(torch.ones(3, 4))
    opt = MuonWithAuxAdam([param])
    run(opt, param, [torch.ones(3, 4)])
    before = opt.state[param]["momentum_buffer"].clone()
    run(opt, param, [torch.full((3, 4), math.nan)])
    assert torch.equal(opt.state[param]["momentum_buffer"], before) and bool(param.isnan().any())
    flat = torch.nn.Parameter(torch.ones(12))
    opt.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones(12)
    with pytest.raises(UsageError, match="whole"):
        opt.step()


@pytest.mark.parametrize(
    "cls", [FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, FusedLamb, DeepSpeedCPUAdagrad, MuonWithAuxAdam]
)
def test_state_dict_and_pickle_continue_exactly(cls):
    start, grads = make(dtype=torch.float32)
    resumed = torch.nn.Parameter(start.clone())
    first = cls([resumed], lr=0.1)
    run(first, resumed, grads[:2])
    second = cls([resumed], lr=0.1)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    run(second, resumed, grads[2:])
    assert torch.equal(trained(cls, start, grads, lr=0.1), resumed)
    assert copy.deepcopy(second).param_groups[0]["lr"] == 0.1


@for_each("cls", [DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion])
def test_wide_moments_of_16_bit_parameters_are_loaded_as_they_were_saved(cls):
    start, grads = make(dtype=torch.bfloat16)
    param = torch.nn.Parameter(start.clone())
    first, second = cls([param], lr=0.1), cls([param], lr=0.1)
    run(first, param, grads[:2])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert not any(value.dtype is torch.bfloat16 for value in second.state[param].values())
    assert torch.equal(run(second, param, grads[2:]), trained(cls, start, grads, lr=0.1))


def test_adam_loads_what_torchs_adam_saved():
    param = torch.nn.Parameter(torch.ones(2))
    theirs = torch.optim.AdamW([param], lr=0.25)
    run(theirs, param, [torch.ones(2)])
    ours = FusedAdam([param])
    ours.load_state_dict(theirs.state_dict())
    run(ours, param, [torch.ones(2)])
    assert ours.param_groups[0]["lr"] == 0.25 and float(ours.state[param]["step"]) == 2


@for_each("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_adamw_stays_adamw_where_a_state_dict_does_not_say_how_weights_decay(cls):
    start, grads = make(dtype=torch.float32)
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    ours, theirs = cls(params[:1], lr=0.1, weight_decay=0.5), torch.optim.AdamW(params[1:], lr=0.1, weight_decay=0.5)
    run(theirs, params[1], grads[:2])
    saved = copy.deepcopy(theirs.state_dict())
    del saved["param_groups"][0]["decoupled_weight_decay"]  # as torch before 2.7, and DeepSpeed, write it
    ours.load_state_dict(saved)
    params[0].data.copy_(params[1].data)
    torch.testing.assert_close(run(ours, params[0], grads[2:]), run(theirs, params[1], grads[2:]))


@for_each("cls", [FusedAdam, FusedLion, FusedLamb, DeepSpeedCPUAdagrad])
def test_closure_and_step_hooks_run_once(cls):
    param = torch.nn.Parameter(torch.ones(2))
    opt, calls = cls([param]), []
    opt.register_step_post_hook(lambda *_: calls.append("hook"))

    def closure():
        param.grad = None
        loss = param.sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 2.0 and calls == ["hook"]


@for_each("cls", [FusedAdam, FusedLion, FusedLamb, DeepSpeedCPUAdagrad])
def test_settings_out_of_range(cls):
    for bad in ({"lr": -1.0}, {"weight_decay": -1.0}, {"betas": (1.0, 0.9)}):
        if cls is not DeepSpeedCPUAdagrad or "betas" not in bad:
            with pytest.raises(ValueError):
                cls([torch.nn.Parameter(torch.ones(2))], **bad)


def test_settings_that_are_not_taken_are_refused():
    params = [torch.nn.Parameter(torch.ones(3, 4))]
    with pytest.raises(ValueError, match="gradient_clipping"):
        FusedLamb(params, max_grad_norm=1.0)
    with pytest.raises(OptimizerConfigError, match="ns_method"):
        MuonWithAuxAdam(params, ns_method="cubic")
    with pytest.raises(NotYetError, match="per_head_muon"):
        MuonWithAuxAdam(params, per_head_muon=True)


def test_sparse_gradients_are_refused():
    param = torch.nn.Parameter(torch.ones(2, 2))
    param.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(OptimizerConfigError, match="sparse"):
        FusedLion([param]).step()
    with pytest.raises(OptimizerConfigError, match="Adagrad without weight_decay"):
        DeepSpeedCPUAdagrad([param], weight_decay=0.1).step()


def test_sparse_gradients_of_an_embedding_update_their_rows_as_torchs_adagrad_does():
    tables = [torch.nn.Embedding(9, 4, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    ours = DeepSpeedCPUAdagrad(tables[0].parameters(), lr=0.1)
    torchs = torch.optim.Adagrad(tables[1].parameters(), lr=0.1)
    for rows in ([1, 3, 3], [3, 8], [1, 1]):
        for table, optimizer in zip(tables, (ours, torchs), strict=True):
            optimizer.zero_grad()
            (table(torch.tensor(rows)).square().sum() * 0.5).backward()
            with torch.sparse.check_sparse_tensor_invariants():  # else torch's own warns
                optimizer.step()
            assert table.weight.grad.is_sparse
    torch.testing.assert_close(tables[0].weight, tables[1].weight)
