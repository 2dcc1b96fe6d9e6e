"""Layers split over ranks: losses, gradients, norms and parameters equal one process within 1e-6 in fp32."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.config.model.tensor_parallel import TensorParallelConfig
from deepspeed.errors import NotYetError, UsageError
from deepspeed.module_inject import layers
from deepspeed.tensor.layers import SharedInput
from deepspeed.tensor.splits import Planner
from deepspeed.tools.verify.grads import scaled_error
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from tests.harness.beside import Beside
from tests.harness.decoders import GPT2, HEADS, WIDTH, Llama, LlamaAttention, attend, batch, loss_of
from tests.harness.pool import RankPool
from tests.harness.training import ADAMW, STAGES, start

pytestmark = pytest.mark.timeout(180)


def _bare(model: Llama) -> Llama:
    """Only the features of a head are known, to the attention."""
    del model.config
    return model


MODELS: dict[str, Any] = {
    "llama": lambda: Llama(),
    "llama, tied, with biases and norms of heads": lambda: Llama(tied=True, bias=True, head_norms=True),
    "llama with one head of keys": lambda: Llama(kv=1, head_norms=True, bias=True),
    "llama, tied": lambda: Llama(tied=True),
    "llama without a configuration": lambda: _bare(Llama()),
    "gpt2": lambda: GPT2(),
    "neox": lambda: GPT2(interleaved=True),
}
UNEVEN: dict[str, Any] = {
    "ten heads, five of keys": lambda: Llama(heads=10, kv=5, bias=True, head_norms=True),
    "five heads, one of keys": lambda: Llama(heads=5, kv=1, bias=True),
    "gpt2 of five heads": lambda: GPT2(heads=5),
    "neox of five heads": lambda: GPT2(heads=5, interleaved=True),
}


class Hidden(LlamaAttention):
    """The number of heads is under ``name``."""

    def __init__(self, config: Any, name: str) -> None:
        super().__init__(config)
        del self.head_dim, self.q_norm, self.k_norm
        self.name = name
        setattr(self, name, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        heads = getattr(self, self.name)
        q, k, v = (p(x) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(q.unflatten(-1, (heads, -1)), *(y.unflatten(-1, (heads // 2, -1)) for y in (k, v))))


class Gated(LlamaAttention):
    """A gate for each token beside the heads."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(self.q_norm(q), self.k_norm(k), v) * self.gate(x).sigmoid())


class Memory(torch.nn.Module):
    """A softmax between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(self.keys(x).softmax(-1))


class Adapter(torch.nn.Module):
    """As PEFT wraps a layer."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = torch.nn.Linear(base.in_features, 2), torch.nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def _with(**kinds: Any) -> Llama:
    model = Llama(head_norms=True)
    for layer in model.model.layers:
        for name, kind in kinds.items():
            setattr(layer, name, kind(model.config))
    return model


def _adapted(*names: str, planned: bool) -> Llama:
    model = Llama(head_norms=True)
    for path in [p for p, _ in model.named_modules() if p.endswith(names)]:
        model.set_submodule(path, Adapter(model.get_submodule(path)))
    if planned:
        ways = dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), "replicated_with_grad_allreduce")
        ways |= dict.fromkeys([f"self_attn.{n}_proj" for n in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"], "colwise")
        ways |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise")
        model._tp_plan = {f"model.layers.*.{name}": way for name, way in ways.items()}
    return model


WHOLE_BETWEEN: dict[str, Any] = {
    "heads that nothing counts": lambda: _with(self_attn=lambda config: Hidden(config, "h")),
    "heads that are called so": lambda: _with(self_attn=lambda config: Hidden(config, "heads")),
    "a gate beside the heads": lambda: _with(self_attn=Gated),
    "a softmax between two layers": lambda: _with(mlp=lambda _: Memory()),
    "adapters on keys and values, by a plan": lambda: _adapted("k_proj", "v_proj", planned=True),
    "adapters on queries and gates, by a plan": lambda: _adapted("q_proj", "gate_proj", planned=True),
    "adapters on keys and gates, by names": lambda: _adapted("k_proj", "gate_proj", planned=False),
}
ALL = MODELS | UNEVEN | WHOLE_BETWEEN


def config(stage: int, ways: int = 2, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, "param_persistence_threshold": 20, "reduce_bucket_size": 400, **changes.pop("zero", {})}
    block = {"autotp_size": ways, **changes.pop("tensor_parallel", {})}
    base = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "optimizer": ADAMW}
    return {**base, "zero_optimization": zero, "tensor_parallel": block, **changes}


def _worst(pairs: Any) -> float:
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def _masters(engine: Any, plain: dict[str, Any]) -> float:
    """The largest error of the parameters."""
    found = [(safe_get_full_fp32_param(p), plain[n].detach()) for n, p in engine.module.named_parameters()]
    return _worst(found)


def beside_plain(engine: Any, name: str, *, steps: int = 2) -> Beside:
    """Train beside one process that sees the batches of all ranks; return the largest errors, those of moments too."""
    plain, data = ALL[name](), engine.mesh.data
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW["params"])  # type: ignore[arg-type]
    worst = Beside(engine, plain, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        losses = [loss_of(plain, batch(step, way)) for way in range(data.size)]
        (sum(losses) / data.size).backward()  # type: ignore[union-attr]
        loss = loss_of(engine, batch(step, data.index))
        engine.backward(loss)
        worst.note("loss", scaled_error(loss, losses[data.index].detach()))  # of a model with a tied head it is large
        worst.gradients()
        worst.update()
    worst.parameters()
    for path, param in engine.module.named_parameters():
        moment = optimizer.state[worst.trained[path]]["exp_avg"]
        worst.note("moment", _worst([(safe_get_full_optimizer_state(param, "exp_avg"), moment)]))
    engine.destroy()
    return worst


def train(name: str, settings: dict[str, Any]) -> Beside:
    """Errors of a model in parts, which is whole again at the end."""
    model = ALL[name]()
    names = list(dict(model.named_parameters()))
    engine = start(model, settings)
    assert list(dict(engine.module.named_parameters())) == names
    worst = beside_plain(engine, name)
    worst.note("given back", _worst((p.detach(), worst.trained[n].detach()) for n, p in model.named_parameters()))
    return worst


@pytest.mark.in_make_test("llama, tied, with biases and norms of heads-3", "gpt2-1")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_two_ways_of_two_ranks_train_as_one_process(pool4: RankPool, name: str, stage: int) -> None:
    for errors in pool4.run(train, name, config(stage)):
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("llama")])
def test_norms_on_parts_of_the_sequence_change_nothing(pool4: RankPool, name: str) -> None:
    for errors in pool4.run(train, name, config(2, tensor_parallel={"sequence_parallel_norms": True})):
        assert max(errors.values()) < 1e-6, errors


def _whole_between() -> dict[str, dict[str, float]]:
    return {name: dict(train(name, config(1))) for name in WHOLE_BETWEEN}


def test_layers_whose_parts_cannot_be_computed_apart_train_as_one_process(pool2: RankPool) -> None:
    for found in pool2.run(_whole_between):
        assert not {name: errors for name, errors in found.items() if max(errors.values()) >= 1e-6}


@pytest.mark.parametrize("between", [torch.nn.GELU(), torch.nn.Softmax(-1)])
def test_two_layers_of_other_names_are_gathered_unless_each_feature_stands_alone(between: torch.nn.Module) -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(4, 8), between, torch.nn.Linear(8, 4))
    splits = Planner(torch.nn.Sequential(inner), TensorParallelConfig(), 2).make().splits
    assert [(split.way, split.whole) for split in splits.values()] == [
        ("column", isinstance(between, torch.nn.Softmax)),
        ("row", isinstance(between, torch.nn.Softmax)),
    ]


def _differently_built() -> float:
    model = Llama()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(dist.get_rank())
    engine = start(model, config(1))
    worst = _masters(engine, dict(Llama().named_parameters()))
    engine.destroy()
    return worst


def test_ranks_that_share_layers_take_the_first_ones_weights(pool4: RankPool) -> None:
    assert pool4.run(_differently_built) == [0.0] * 4


def _distributed_by_torch(stage: int) -> Beside:
    """A model that torch's own ``parallelize_module`` has cut before."""
    model, mesh = Llama(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    plan: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    for i in (0, 1):
        layer = f"model.layers.{i}"
        plan |= {f"{layer}.self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
        plan |= {f"{layer}.self_attn.o_proj": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    settings = config(stage)
    del settings["tensor_parallel"]
    return beside_plain(start(model, settings), "llama")


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_torch_has_distributed_train_as_they_are(pool4: RankPool, stage: int) -> None:
    for errors in pool4.run(_distributed_by_torch, stage):
        assert max(errors.values()) < 1e-6, errors


def _born_sharded(stage: int) -> list[float]:
    """Built under zero.Init over all ranks, then cut into parts."""
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = Llama(tied=True)
    engine = start(model, config(stage))
    born = _masters(engine, dict(Llama(tied=True).named_parameters()))
    return [born, *beside_plain(engine, "llama, tied", steps=1).values()]


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_born_sharded_is_cut_unit_by_unit(pool4: RankPool, stage: int) -> None:
    for errors in pool4.run(_born_sharded, stage):
        assert max(errors) < 1e-6, errors


def _offloaded(folder: str) -> Beside:
    drive = {"device": "nvme", "nvme_path": folder}
    zero = {"offload_optimizer": drive, "offload_param": drive}
    return train("gpt2", config(3, zero=zero))


def test_parts_rest_on_drives(pool4: RankPool, tmp_path: Path) -> None:
    for errors in pool4.run(_offloaded, str(tmp_path)):
        assert max(errors.values()) < 1e-6, errors


def _sixteen_bits(dtype: str) -> tuple[list[float], int]:
    block = {"enabled": True, **({"initial_scale_power": 4} if dtype == "fp16" else {})}
    settings = config(3, **{dtype: block, "gradient_accumulation_steps": 2})
    engine = start(Llama(tied=True), settings)
    losses = []
    for _ in range(12):
        loss = loss_of(engine, batch(0, engine.mesh.data.index))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return losses, engine.skipped_steps


@pytest.mark.in_make_test("bf16")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_learn_with_the_same_losses_on_ranks_that_share_layers(pool4: RankPool, dtype: str) -> None:
    results = pool4.run(_sixteen_bits, dtype)
    assert results[0] == results[1] and results[2] == results[3]
    for losses, skipped in results:
        assert losses[-1] < losses[0] - 0.1 and not skipped


@pytest.mark.in_make_test("llama with one head of keys")
@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_share_each_layer(pool4: RankPool, name: str) -> None:
    for errors in pool4.run(train, name, config(3, 4)):
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.in_make_test(
    "ten heads, five of keys-3-2", "five heads, one of keys-2-4", "gpt2 of five heads-0-2", "neox of five heads-3-2"
)
@pytest.mark.parametrize(("stage", "ways"), [(0, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("name", UNEVEN)
def test_heads_that_ranks_do_not_divide_are_dealt_out_unevenly(
    pool4: RankPool, name: str, stage: int, ways: int
) -> None:
    for errors in pool4.run(train, name, config(stage, ways)):
        assert max(errors.values()) < 1e-6, errors


def _whole_values(stage: int) -> list[float]:
    """Errors of what GatheredParameters, consolidation and a setter show or take of a model in parts."""
    name = "llama, tied, with biases and norms of heads"
    model, plain = MODELS[name](), dict(MODELS[name]().named_parameters())
    engine = start(model, config(stage))
    params = dict(engine.module.named_parameters())
    errors = []
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        errors.append(_worst((p.detach(), plain[n].detach()) for n, p in params.items()))
    up = engine.module.model.layers[0].mlp.up_proj
    with layers.GatherReplacedLayerParams(up.weight, up):
        errors.append(_worst([(up.weight.detach(), plain["model.layers.0.mlp.up_proj.weight"].detach())]))
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
    errors.append(_masters(engine, {n: p * 2 for n, p in plain.items()}))
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


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_values_come_and_go_where_layers_are_in_parts(pool4: RankPool, stage: int) -> None:
    for errors in pool4.run(_whole_values, stage):
        assert max(errors) < 1e-6, errors


def _save(name: str, stage: int, ways: int, folder: str) -> tuple[str, float]:
    """Train a step and half a window, save; the state's digest and the loss of the next step."""
    settings = config(stage, ways, gradient_accumulation_steps=2)
    engine = start(ALL[name](), settings)
    for step in range(3):
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
    engine = start(ALL[name](), settings)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        for param in engine.module.parameters():
            param.zero_()
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    return _digest(engine), _next(engine)


@pytest.mark.in_make_test("gpt2 of five heads")
@pytest.mark.parametrize("name", ["llama, tied, with biases and norms of heads", "gpt2", "gpt2 of five heads"])
def test_saved_at_one_layout_and_loaded_at_any_other(
    pool1: RankPool, pool2: RankPool, pool4: RankPool, tmp_path: Path, name: str
) -> None:
    """All ranks are fed the same data, so that every layout computes the same; an open window is saved too."""
    pools = {1: pool1, 2: pool2, 4: pool4}
    layouts = [(4, 2, 3), (1, 1, 1), (4, 4, 0), (2, 2, 2), (2, 1, 3)]  # ranks, those that share a layer, stage
    for at, (ranks, ways, stage) in enumerate(layouts[:3]):
        folder = str(tmp_path / str(at))
        digest, loss = pools[ranks].run(_save, name, stage, ways, folder)[0]
        for to, (others, shared, level) in enumerate(layouts):
            if to != at and 0 in (at, to):
                for found, after in pools[others].run(_load, name, level, shared, folder):
                    assert found == digest and after == pytest.approx(loss, rel=1e-6)


def _dropped(*, recompute: bool) -> tuple[float, Tensor, Tensor]:
    """Trained with dropout: the loss, a norm's gradient (every rank has all of it) and a gradient of an attention."""
    torch.manual_seed(dist.get_rank())  # ranks that share layers must still drop the same
    model = GPT2(dropout=0.4)
    if recompute:
        for block in model.h:
            run = block.forward
            block.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
    torch.manual_seed(dist.get_rank())
    engine = start(model, config(2))
    for step in range(2):
        loss = loss_of(engine, batch(step, engine.mesh.data.index))
        engine.backward(loss)
        grads = [safe_get_full_grad(p).clone() for p in (model.ln_f.weight, model.h[0].attn.c_attn.weight)]
        engine.step()
    engine.destroy()
    return float(loss.detach()), grads[0], grads[1]


def test_dropout_is_the_same_on_what_is_whole_and_survives_recomputation(pool4: RankPool) -> None:
    once, again = pool4.run(_dropped, recompute=False), pool4.run(_dropped, recompute=True)
    for (loss, norm, attention), (other, norm_again, attention_again) in zip(once, again, strict=True):
        assert loss == pytest.approx(other, abs=1e-6)
        assert torch.allclose(norm, norm_again, atol=1e-6) and torch.allclose(attention, attention_again, atol=1e-6)
        assert torch.equal(norm, once[0][1]) and torch.equal(attention, once[0][2])
    assert once[0][0] == once[1][0] != once[2][0] == once[3][0]  # by data-parallel rank


def random_states(ways: int, folder: str, *, load: bool) -> int:
    """A checksum of the state of torch's generator, of a rank that had a seed of its own."""
    model = GPT2(dropout=0.4)
    torch.manual_seed(100 + dist.get_rank())
    engine = start(model, config(1, ways))
    if load:
        engine.load_checkpoint(folder)
    else:
        engine.save_checkpoint(folder)
    found = int(torch.get_rng_state().long().sum()), float(torch.rand(()))
    engine.destroy()
    return hash(found)


def test_dropout_is_the_same_on_what_is_whole_after_a_load_of_other_ranks(
    pool2: RankPool, pool4: RankPool, tmp_path: Path
) -> None:
    assert len(set(pool2.run(random_states, 1, str(tmp_path), load=False))) == 2
    a, b, c, d = pool4.run(random_states, 2, str(tmp_path), load=True)
    assert a == b and c == d


def _draws() -> list[list[float]]:
    torch.manual_seed(3)
    shared = SharedInput(plain_mesh("gloo").job, random=True)
    drawn = [float(torch.rand(()))]
    shared.begin_parts()
    shared.begin_parts()
    drawn.append(float(torch.rand(())))
    shared.end_parts()
    return [*drawn, float(torch.rand(()))]


def test_each_rank_draws_numbers_of_its_own_for_its_part_only(pool2: RankPool) -> None:
    (before, mine, after), (before_there, theirs, after_there) = pool2.run(_draws)
    assert before == before_there and after == after_there and mine != theirs


def _refusals() -> list[str]:
    rule = {"patterns": ["decoder.layers"], "partition_type": "row"}
    odd = {"partition_config": {"layer_specs": [rule]}}
    cases: list[tuple[Any, dict[str, Any], Any]] = [
        (lambda: Llama(kv=4), config(0, 4, tensor_parallel=odd), {}),
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)), config(0), {}),
        (Llama, config(0, 3), {}),
        (Llama, config(0, optimizer={"type": "Muon", "params": {"lr": 0.1}}), {}),
        (Llama, config(0, tensor_parallel={"vocab_parallel_lm_head": True}), {}),
        (lambda: deepspeed.tp_model_init(Llama(), 4), config(0, 2), {}),
        (lambda: Llama(heads=6), config(0, 4), {}),
        (lambda: Llama(heads=6, kv=3), config(0, 4), {}),
    ]
    texts = []
    for build, settings, more in cases:
        model = build()
        classes = [type(m) for m in model.modules()]
        with pytest.raises((ValueError, NotYetError)) as caught:
            deepspeed.initialize(model=model, config=settings, **more)
        texts.append(str(caught.value))
        assert [type(m) for m in model.modules()] == classes and not any(
            hasattr(p, "tp_place") for p in model.parameters()
        )
    engine = start(Llama(), config(0))
    with pytest.raises(AssertionError) as differs:
        engine(batch(0, dist.get_rank()))
    engine.destroy()
    return [*texts, str(differs.value)]


def test_what_cannot_be_split_is_refused_in_a_sentence(pool4: RankPool) -> None:
    expected = (
        "'decoder.layers' names no parameter of Llama; patterns are regular expressions",
        "no layer of Sequential is known to be one that can be split",
        "autotp_size 3 does not divide the number of ranks, 4",
        "MuonWithAuxAdam looks at whole tensors",
        "Llama has no loss_function",
        "autotp_size is 2, but tp_model_init says 4",
        "autotp_size 4 does not fit the attention of model.layers.0.self_attn, whose heads are 6 (2 of",
        "autotp_size 4 does not fit the attention of model.layers.0.self_attn, whose heads are 6 (3 of",
        "share every layer (tensor parallelism) and were fed different batches",
    )
    for texts in pool4.run(_refusals):
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def _layers_by_hand() -> list[float]:
    """As clients use them: made of a layer and a process group, without any engine."""
    torch.manual_seed(0)
    up, down, table = torch.nn.Linear(6, 9), torch.nn.Linear(9, 6), torch.nn.Embedding(7, 6)
    ids = torch.arange(7)
    expected = down(torch.tanh(up(table(ids))))
    whole, group = up.weight.detach().clone(), dist.group.WORLD
    column, row = layers.LinearLayer(up, group), layers.LinearAllreduce(down, group)
    words = layers.VocabParallelEmbedding(table, group)
    found = row(torch.tanh(column(words(ids))))
    for odd in (-1, 7):
        with pytest.raises(IndexError):
            words(torch.tensor([0, odd]))
    shapes = [tuple(column.weight.shape), tuple(row.weight.shape), tuple(words.weight.shape)]
    assert shapes == [[(5, 6), (6, 5), (4, 6)], [(4, 6), (6, 4), (3, 6)]][dist.get_rank()]
    with layers.GatherReplacedLayerParams(column.weight, column):
        errors = [float((column.weight - whole).abs().max())]
    assert tuple(column.weight.shape) == shapes[0]
    layers.set_autotp_mode(training=True)
    assert layers.is_autotp_training_mode()
    return [*errors, float((found - expected).abs().max())]


def test_layers_work_without_an_engine(pool2: RankPool) -> None:
    for errors in pool2.run(_layers_by_hand):
        assert max(errors) < 1e-6
