"""Layers split over ranks: losses, gradients, norms and parameters equal one process within 1e-6 in fp32."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from tests.harness.decoders import GPT2, Llama, batch, loss_of
from tests.harness.pool import RankPool
from tests.harness.training import ADAMW, STAGES

pytestmark = pytest.mark.timeout(180)

MODELS: dict[str, Any] = {
    "llama": lambda: Llama(),
    "llama, tied, with biases and norms of heads": lambda: Llama(tied=True, bias=True, head_norms=True),
    "llama with one head of keys": lambda: Llama(kv=1, head_norms=True, bias=True),
    "gpt2": lambda: GPT2(),
    "neox": lambda: GPT2(interleaved=True),
}


def config(stage: int, ways: int = 2, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, "param_persistence_threshold": 20, "reduce_bucket_size": 400, **changes.pop("zero", {})}
    block = {"autotp_size": ways, **changes.pop("tensor_parallel", {})}
    base = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "optimizer": ADAMW}
    return {**base, "zero_optimization": zero, "tensor_parallel": block, **changes}


class Reference:
    """Plain training on the data of ``ways`` data-parallel ranks."""

    def __init__(self, name: str, ways: int) -> None:
        self.model, self.ways = MODELS[name](), ways
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW["params"])

    def step(self, step: int) -> tuple[list[float], float, dict[str, Tensor]]:
        """Losses by data-parallel rank, norm before clipping, gradients before clipping."""
        losses = [loss_of(self.model, batch(step, way)) for way in range(self.ways)]
        self.optimizer.zero_grad()
        (sum(losses) / self.ways).backward()  # type: ignore[union-attr]
        grads = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        self.optimizer.step()
        return [float(loss) for loss in losses], norm, grads


def _worst(pairs: Any) -> float:
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def train(name: str, settings: dict[str, Any], ways: int, steps: int = 3) -> list[float]:
    """Largest errors of losses, norms, gradients, parameters and moments."""
    model = MODELS[name]()
    names = list(dict(model.named_parameters()))
    engine = deepspeed.initialize(model=model, config=settings)[0]
    assert list(dict(engine.module.named_parameters())) == names
    reference, mesh = Reference(name, dist.get_world_size() // ways), engine.mesh
    errors = [0.0] * 5
    for step in range(steps):
        losses, norm, grads = reference.step(step)
        loss = loss_of(engine, batch(step, mesh.data.index))
        engine.backward(loss)
        found = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
        engine.step()
        errors[0] = max(errors[0], abs(float(loss) - losses[mesh.data.index]))
        errors[1] = max(errors[1], abs(engine.get_global_grad_norm() - norm) / norm)
        errors[2] = max(errors[2], _worst((found[n], grads[n]) for n in names))
        masters = ((safe_get_full_fp32_param(p), n) for n, p in engine.module.named_parameters())
        plain = dict(reference.model.named_parameters())
        errors[3] = max(errors[3], _worst((m, plain[n].detach()) for m, n in masters))
        slots = ((safe_get_full_optimizer_state(p, "exp_avg"), n) for n, p in engine.module.named_parameters())
        errors[4] = max(errors[4], _worst((s, reference.optimizer.state[plain[n]]["exp_avg"]) for s, n in slots))
    engine.destroy()
    errors.append(_worst((p.detach(), plain[n].detach()) for n, p in model.named_parameters()))
    return errors


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_two_ways_of_two_ranks_train_as_one_process(pool4: RankPool, name: str, stage: int) -> None:
    for errors in pool4.run(train, name, config(stage), 2):
        assert max(errors) < 1e-6, errors


@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_share_each_layer(pool4: RankPool, name: str) -> None:
    for errors in pool4.run(train, name, config(3, 4), 4):
        assert max(errors) < 1e-6, errors


def _whole_values(stage: int) -> list[float]:
    """Errors of what GatheredParameters, consolidation and a setter show or take of a model in parts."""
    name = "llama, tied, with biases and norms of heads"
    model, plain = MODELS[name](), dict(MODELS[name]().named_parameters())
    engine = deepspeed.initialize(model=model, config=config(stage))[0]
    params = dict(engine.module.named_parameters())
    errors = []
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        errors.append(_worst((p.detach(), plain[n].detach()) for n, p in params.items()))
    with torch.no_grad():
        with deepspeed.zero.GatheredParameters(list(params.values()), modifier_rank=3):
            for p in params.values():
                p.add_(dist.get_rank())
        state = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        errors.append(_worst((state[n], plain[n].detach() + 3) for n in plain))
        assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    for n, p in params.items():
        deepspeed.utils.safe_set_full_fp32_param(p, plain[n].detach() * 2)
    errors.append(_worst((safe_get_full_fp32_param(p), plain[n].detach() * 2) for n, p in params.items()))
    engine.load_module_state_dict({n: v.detach() * 3 for n, v in MODELS[name]().state_dict().items()})
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        errors.append(_worst((p.detach(), plain[n].detach() * 3) for n, p in params.items()))
    with (
        pytest.raises(UsageError, match="were edited in a read-only context"),
        deepspeed.zero.GatheredParameters(engine.module.parameters()),
        torch.no_grad(),
    ):
        params["model.layers.0.mlp.up_proj.weight"].mul_(2)
    loss_of(engine, batch(0, 0)).backward()
    engine.destroy()
    return errors


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_values_come_and_go_where_layers_are_in_parts(pool4: RankPool, stage: int) -> None:
    for errors in pool4.run(_whole_values, stage):
        assert max(errors) < 1e-6, errors


def _save(name: str, stage: int, ways: int, folder: str) -> tuple[str, float]:
    """Train two steps and half a window, save; the state's digest and the loss of the next step."""
    settings = config(stage, ways, gradient_accumulation_steps=2)
    engine = deepspeed.initialize(model=MODELS[name](), config=settings)[0]
    for step in range(5):
        engine.backward(loss_of(engine, batch(step, 0)))
        engine.step()
    engine.save_checkpoint(folder, "t")
    return _digest(engine), _next(engine)


def _next(engine: Any) -> float:
    engine.backward(loss_of(engine, batch(9, 0)))
    engine.step()
    loss = float(loss_of(engine, batch(10, 0)).detach())
    engine.destroy()
    return loss


def _digest(engine: Any) -> str:
    total = hashlib.sha256()
    for name, param in sorted(engine.module.named_parameters()):
        values = [safe_get_full_fp32_param(param)]
        values += [safe_get_full_optimizer_state(param, slot) for slot in ("exp_avg", "exp_avg_sq")]
        for value in values:
            total.update(name.encode() + value.contiguous().numpy().tobytes())
    return total.hexdigest()


def _load(name: str, stage: int, ways: int, folder: str) -> tuple[str, float]:
    settings = config(stage, ways, gradient_accumulation_steps=2)
    engine = deepspeed.initialize(model=MODELS[name](), config=settings)[0]
    with torch.no_grad(), deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        for param in engine.module.parameters():
            param.zero_()
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    return _digest(engine), _next(engine)


@pytest.mark.parametrize("name", ["llama, tied, with biases and norms of heads", "gpt2"])
def test_saved_at_one_layout_and_loaded_at_any_other(
    pool1: RankPool, pool2: RankPool, pool4: RankPool, tmp_path: Path, name: str
) -> None:
    """All ranks are fed the same data, so that every layout computes the same; an open window is saved too."""
    pools = {1: pool1, 2: pool2, 4: pool4}
    layouts = [(4, 2, 3), (4, 4, 0), (2, 2, 2), (1, 1, 1), (2, 1, 3)]  # ranks, those that share a layer, stage
    for at, (ranks, ways, stage) in enumerate(layouts[:4]):
        folder = str(tmp_path / str(at))
        digest, loss = pools[ranks].run(_save, name, stage, ways, folder)[0]
        for to, (others, shared, level) in enumerate(layouts):
            if to != at:
                for found, after in pools[others].run(_load, name, level, shared, folder):
                    assert found == digest and after == pytest.approx(loss, abs=1e-6)
