"""Experts over ranks: losses, gradients, norms and parameters equal one process, whatever stage, tier and layout."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.checkpoint.load.reader import open_checkpoint
from deepspeed.client.comm.groups import register_topology
from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.moe.exchange import plan_routes, through_experts
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.utils import groups
from tests.harness.beside import Beside
from tests.harness.experts import HIDDEN, Expert, Layered, Stacked, StackedExperts, StackedLlama, staged, tokens_of
from tests.harness.training import make_config, start

pytestmark = pytest.mark.timeout(180)
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}}
_PARTS = {"tensor_parallel": {"autotp_size": 2}}
DROPLESS = {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False}


def model_of(kind: str, ep: int, **options: Any) -> Any:
    """A new model; ``ep`` 1: all experts on each rank."""
    return Layered(ep, **options) if kind == "layered" else {"stacked": Stacked, "llama": StackedLlama}[kind](**options)


def config_of(kind: str, ep: int, stage: int, **changes: Any) -> dict[str, Any]:
    etp = changes.pop("etp", 1)
    block = {"enabled": kind != "layered" and ep * etp > 1, "autoep_size": ep, "expert_tensor_parallel_size": etp}
    return make_config(stage, optimizer=ADAMW, gradient_clipping=0.5, expert_parallel=block, **changes)


def _recomputed(model: Any) -> None:
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda hidden, forward=forward: checkpoint(forward, hidden, use_reentrant=False)


@torch.no_grad()
def _skewed(model: Any) -> None:
    """Every token goes to the first experts: most ranks have none."""
    for layer in model.layers:
        gate = layer.deepspeed_moe.gate.wg if isinstance(model, Layered) else layer.gate
        gate.weight.zero_()


def _scaled(model: Any) -> None:
    torch.manual_seed(9)
    for layer in model.layers:
        layer.experts.scaled()


def _frozen(model: Any) -> None:
    """As under an adapter: experts and routers are fixed."""
    for name, param in model.named_parameters():
        param.requires_grad_("expert" not in name and "gate" not in name)


PREPARED = {
    "": lambda _: None,
    "recomputed": _recomputed,
    "skewed": _skewed,
    "scaled": _scaled,
    "frozen": _frozen,
}


def parity(
    kind: str, ep: int, stage: int, options: dict[str, Any], changes: dict[str, Any], how: str
) -> dict[str, float]:
    """Train two steps beside one process that sees the batches of all ranks; return the largest errors."""
    tp = changes.get("tensor_parallel", {}).get("autotp_size", 1)
    rank, world = dist.get_rank() // tp, dist.get_world_size() // tp
    gas = changes.get("gradient_accumulation_steps", 1)
    model, plain = model_of(kind, ep, **options), model_of(kind, 1, **options)
    PREPARED[how](model)
    PREPARED[how](plain)
    engine = start(model, config_of(kind, ep, stage, **changes))
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAMW["params"])  # type: ignore[arg-type]
    worst = Beside(engine, plain, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(gas):
            losses = [plain(tokens_of(gas * step + micro, r)) for r in range(world)]
            (sum(losses) / (world * gas)).backward()  # type: ignore[union-attr]
            loss = engine(tokens_of(gas * step + micro, rank))
            engine.backward(loss)
            worst.loss(loss, losses[rank])
            if micro < gas - 1:
                engine.step()
        worst.gradients()
        worst.update()
    worst.parameters()
    engine.destroy()
    shapes = {n: p.shape for n, p in plain.named_parameters()}
    given_back = all(p.shape == shapes[n] for n, p in model.named_parameters())
    return {**worst, "given back": float(not given_back)}


CELLS: dict[str, tuple[Any, ...]] = {
    "stage 0, two ranks an expert, top-2": ("stacked", 2, 0, {}, {}, ""),
    "stage 2, accumulation": ("stacked", 2, 2, {}, {"gradient_accumulation_steps": 2}, ""),
    "stage 3, top-8 of 16": ("stacked", 2, 3, {"experts": 16, "k": 8}, {}, ""),
    "stage 3, recomputed": ("stacked", 2, 3, {}, {}, "recomputed"),
    "ranks without tokens": ("stacked", 4, 3, {"k": 1}, {}, "skewed"),
    "ranks without tokens, stage 1": ("stacked", 4, 1, {}, {}, "skewed"),
    "a number for each expert": ("stacked", 2, 1, {}, {}, "scaled"),
    "frozen experts": ("stacked", 2, 3, {}, {}, "frozen"),
    "shard groups": ("stacked", 2, 3, {}, {"zero": {"mics_shard_size": 2}}, ""),
    "neighbours hold the same experts": ("stacked", 2, 3, {}, {"use_data_before_expert_parallelism": True}, ""),
    "layer, neighbours hold the same experts": (
        "layered", 2, 1, DROPLESS, {"use_data_before_expert_parallelism": True}, ""
    ),
    "secondary shards": ("stacked", 2, 3, {}, {"zero": {"zero_hpz_partition_size": 2}}, ""),
    "optimizer in host memory": ("stacked", 2, 2, {}, {"zero": {"offload_optimizer": {"device": "cpu"}}}, ""),
    "two ranks share an expert, stage 0": ("stacked", 2, 0, {}, {"etp": 2}, ""),
    "two ranks share an expert, stage 3, skewed": ("stacked", 2, 3, {}, {"etp": 2}, "skewed"),
    "all experts are shared": ("stacked", 1, 3, {}, {"etp": 2}, ""),
    "shared experts folded over tensor-parallel ranks": ("llama", 2, 3, {}, {"etp": 2, **_PARTS}, ""),
    "folded over tensor-parallel ranks": ("llama", 4, 3, {}, _PARTS, ""),
    "beside tensor parallelism": ("llama", 2, 1, {}, _PARTS, ""),
    "experts in tiles": ("llama", 2, 3, {}, {"sequence": {"mlp_tiles": 3}}, ""),
    "layer, ranks without tokens": ("layered", 4, 3, {**DROPLESS, "k": 1}, {}, "skewed"),
    "layer, top-2 without capacity": ("layered", 2, 1, DROPLESS, {}, ""),
    "layer, top-1 with capacity": ("layered", 4, 3, {"k": 1, "use_rts": False, "min_capacity": 1}, {}, ""),
    "layer, top-2 with capacity": ("layered", 2, 0, {**DROPLESS, "drop_tokens": True, "min_capacity": 2}, {}, ""),
    "layer, top-3, residual": ("layered", 2, 3, {"k": 3, "min_capacity": 2, "use_residual": True}, {}, ""),
}  # fmt: skip


SHOWN_BY_OTHERS = {"ranks without tokens, stage 1", "beside tensor parallelism"}
SHOWN_BY_OTHERS |= {"neighbours hold the same experts", "layer, top-2 without capacity"}


@pytest.mark.in_make_test(*(CELLS.keys() - SHOWN_BY_OTHERS))
@pytest.mark.parametrize("cell", CELLS)
def test_training_equals_one_process(pool4: Any, cell: str) -> None:
    for errors in pool4.run(parity, *CELLS[cell]):
        assert max(errors.values()) <= 2e-6, errors


def _covered(ep: int, stage: int, tier: str, k: int, path: str) -> dict[str, float]:
    offload = {"offload_optimizer": {"device": tier, "nvme_path": path}}
    if stage == 3:
        offload["offload_param"] = {"device": tier, "nvme_path": path}
    return parity("stacked", ep, stage, {"k": k}, {"zero": offload}, "")


@pytest.mark.exhaustive  # test_experts_wide.py has those on the device
@pytest.mark.parametrize("ep", [2, 4])
def test_training_equals_one_process_in_every_cell(pool4: Any, ep: int, tmp_path: Path) -> None:
    for stage, tier, k in itertools.product(range(1, 4), ("cpu", "nvme"), (1, 2, 8)):
        for errors in pool4.run(_covered, ep, stage, tier, k, str(tmp_path)):
            assert max(errors.values()) <= 2e-6, (stage, tier, k, errors)


def _resumed(kind: str, before: tuple[int, int, int], after: tuple[int, int, int], folder: str) -> float:
    """Train, save, train on; load into another layout, train on: the largest difference of losses."""
    rank, runs, options = dist.get_rank(), [], DROPLESS if kind == "layered" else {}
    for ep, etp, stage in (before, after):
        model = model_of(kind, ep, **options)
        groups = deepspeed.moe.utils.configure_moe_param_groups(model.parameters())
        engine = start(model, config_of(kind, ep, stage, etp=etp), model_parameters=groups)
        first = (ep, etp, stage) == before
        if first:
            engine.backward(engine(tokens_of(0, rank)))
            engine.step()
        engine.save_checkpoint(folder) if first else engine.load_checkpoint(folder)
        losses = []
        for step in (1, 2):
            loss = engine(tokens_of(step, rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        runs.append(losses)
        engine.destroy()
    return max(abs(a - b) for a, b in zip(*runs, strict=True))


MOVES = [
    ("stacked", (2, 1, 1), (4, 1, 3)), ("stacked", (4, 1, 3), (1, 1, 0)), ("stacked", (2, 1, 0), (2, 2, 3)),
    ("stacked", (1, 2, 3), (2, 1, 2)), ("layered", (2, 1, 1), (4, 1, 3)), ("layered", (4, 1, 3), (1, 1, 0)),
]  # fmt: skip


# Stacked experts go from two ranks to four in test_experts_runtime.py too; layers from four to one as stacks do.
@pytest.mark.in_make_test(
    "stacked-before1-after1", "stacked-before2-after2", "stacked-before3-after3", "layered-before4-after4"
)
@pytest.mark.parametrize(("kind", "before", "after"), MOVES)
def test_a_checkpoint_loads_with_experts_over_other_ranks(
    pool4: Any, tmp_path: Path, kind: str, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    """Each layout is: expert-parallel ranks, ranks that share an expert, ZeRO stage."""
    assert max(pool4.run(_resumed, kind, before, after, str(tmp_path))) <= 1e-6


def _next_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pipeline(stage: int) -> list[float]:
    """Two stages, in each two ranks that divide the experts: differences of loss and norm from one process."""
    model = PipelineModule(staged(2), num_stages=2, loss_fn=_next_loss)
    config = make_config(stage, optimizer=ADAMW, gradient_clipping=0.5, gradient_accumulation_steps=2)
    engine = start(model, {**config, "train_micro_batch_size_per_gpu": 2})
    ways, plain, apart = engine.mesh.data.size, torch.nn.Sequential(*staged(1)), []
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW["params"])  # type: ignore[arg-type]
    for step in range(3):
        batches = {w: [tokens_of(2 * step + m, w) for m in range(2)] for w in range(ways)}
        loss = engine.train_batch(iter([(t, t.roll(-1, 1)) for t in batches[engine.mesh.data.index]]))
        optimizer.zero_grad()
        wanted = sum(_next_loss(plain(t), t.roll(-1, 1)) for of_way in batches.values() for t in of_way) / (2 * ways)
        wanted.backward()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        apart += [abs(float(loss) - float(wanted.detach())), abs(engine.get_global_grad_norm() - float(norm))]  # type: ignore[union-attr]
    engine.destroy()
    return apart


@pytest.mark.parametrize("stage", [1, 3])
def test_a_pipeline_divides_experts_within_a_stage(pool4: Any, stage: int) -> None:
    for apart in pool4.run(pipeline, stage):
        assert max(apart) < 1e-6


def _whole(kind: str, folder: str) -> list[str]:
    """Names whose gathered or saved values differ from the model before it was divided, or are in no saved group."""
    options = DROPLESS if kind == "layered" else {}
    wanted = model_of(kind, 1, **options).state_dict()
    engine = start(model_of(kind, 2, **options), config_of(kind, 2, 1))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        gathered = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    wrong = [n for n, value in gathered.items() if not torch.equal(value, wanted[n])]
    engine.save_16bit_model(folder)
    saved = torch.load(f"{folder}/pytorch_model.bin")
    engine.save_checkpoint(folder, tag="all")
    engine.destroy()
    groups = open_checkpoint(Path(folder) / "all").facts["optimizer"]["groups"]
    wrong += sorted(set(wanted) - {name for group in groups for name in group["names"]})
    return wrong + [n for n, value in wanted.items() if n not in saved or not torch.equal(saved[n].float(), value)]


@pytest.mark.parametrize("kind", ["stacked", "layered"])
def test_whole_weights_have_the_experts_of_all_ranks(pool2: Any, tmp_path: Path, kind: str) -> None:
    assert pool2.run(_whole, kind, str(tmp_path)) == [[], []]


def _bytes_sent() -> tuple[int, int, bool]:
    """Numbers that travel for tokens of eight experts on two ranks; what the formula says; whether sums are right."""
    job = plain_mesh("gloo").job
    group = AxisGroup(job.pg, job.size, job.index, job.ranks, job.backend)
    counted: list[int] = []
    group.ledger.append(lambda op, numel, *_: counted.append(numel) if op == "all_to_all" else None)
    torch.manual_seed(group.index)
    hidden, k, experts = torch.randn(10, HIDDEN), 8, 8
    index = torch.stack([torch.randperm(16)[:k] for _ in range(10)])
    index[0, :] = torch.arange(8)  # all on the first rank
    index[1, :3] = -1
    weights = torch.rand(10, k)
    routes = plan_routes(index, group, experts)
    counted.clear()
    first = group.index * experts

    def compute(rows: torch.Tensor, local: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return rows * (1 + local + first) * scales

    out = through_experts(hidden, index, weights, group=group, experts=experts, compute=compute)
    scale = torch.where(index >= 0, (1 + index) * weights, 0.0).sum(-1, keepdim=True)
    counts = 3 * group.size  # rows, pairs of a row and an expert, and whether scores are finite
    formula = counts + sum(routes.sent) * (HIDDEN + 2 * k) + sum(routes.received) * HIDDEN
    distinct = sum(len({int(e) // experts for e in row if e >= 0}) for row in index)
    return sum(counted), formula, bool(sum(routes.sent) == distinct and torch.allclose(out, hidden * scale, atol=1e-4))


def test_a_token_travels_once_to_each_rank_of_its_experts(pool2: Any) -> None:
    for sent, formula, right in pool2.run(_bytes_sent):
        assert sent == formula and right


def _of_layers(change: Callable[[Any], None]) -> Callable[[], Stacked]:
    """A model whose layers are changed."""

    def build() -> Stacked:
        model = Stacked()
        for layer in model.layers:
            change(layer)
        return model

    return build


def _routed(layer: Any) -> None:
    """A router that says, as those of Transformers do, of how many experts it has a row each."""
    layer.gate.num_experts = 8


class Choosing(StackedExperts):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return hidden


def _own_choice(layer: Any) -> None:
    layer.experts = Choosing(8)


def _normed(layer: Any) -> None:
    layer.experts.norm = torch.nn.LayerNorm(HIDDEN)


def _block(**keys: Any) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, **keys}}


def _patterned(**keys: Any) -> dict[str, Any]:
    return _block(autoep_size=2, moe_layer_pattern=r"layers\.\d+", **keys)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "ranks": (
        Stacked, _block(autoep_size=3), "autoep_size x expert_tensor_parallel_size = 3 does not divide the 2 ranks"
    ),
    "experts": (lambda: Stacked(experts=5), {}, "autoep_size 2 does not divide the 5 experts of layers.0.experts"),
    "pattern": (Stacked, _block(autoep_size=2, moe_layer_pattern="blocks.*"), "matches no module of Stacked"),
    "no regular expression": (Stacked, _block(autoep_size=2, moe_layer_pattern="("), "is no regular expression"),
    "no regular expression for experts": (
        Stacked, _patterned(expert_pattern="["), "with expert_pattern '[' is no regular expression"
    ),
    "experts of no layer": (
        Stacked, _block(autoep_size=2, expert_pattern="others"),
        "expert_pattern 'others' says where the experts are in the layers of moe_layer_pattern, which is not set",
    ),
    "a router in place of experts": (
        _of_layers(_routed), _patterned(expert_pattern="gate"),
        "layers.0.gate is a Linear, whose experts are no stacked tensors",
    ),
    "experts that choose by themselves": (
        _of_layers(_own_choice), {}, "layers.0.experts is a Choosing, whose experts are no stacked tensors"
    ),
    "a norm of whole outputs": (
        _of_layers(_normed), _block(expert_tensor_parallel_size=2), "layers.0.experts.norm.weight is not known"
    ),
    "not stacked": (Stacked, _patterned(expert_pattern="norm"), "no stacked tensors"),
    "parts of sequences": (
        Stacked, {"tensor_parallel": {"autotp_size": 2, "sequence_parallel_norms": True}},
        "sequence_parallel_norms cannot be combined with expert_parallel",
    ),
    "inner width": (lambda: Stacked(inner=25), _block(expert_tensor_parallel_size=2), "has an inner width of 25"),
    "preset": (Stacked, _block(autoep_size=2, preset_model="gpt"), "preset_model must be"),
    "data before experts": (
        StackedLlama, {**_PARTS, "use_data_before_expert_parallelism": True},
        "use_data_before_expert_parallelism cannot be combined with tensor parallelism",
    ),
    "router without a bias": (
        Stacked, _block(load_balance_coeff=1e-3),
        "the router of layers.0.experts (StackedBlock) has no bias of 8 scores",
    ),
    "coefficient": (Stacked, _block(load_balance_coeff=0.0), "expert_parallel.load_balance_coeff"),
    "layer over more ranks": (lambda: Layered(4), {"expert_parallel": {}}, "expert-parallel size 4 does not divide"),
    "capacity": (lambda: Layered(1, capacity_factor=0.0), {}, "must be above 0"),
    "choices": (lambda: Layered(1, k=5), {}, "k is from 1 to 4"),
    "uneven layer": (lambda: Layered(3), {}, "ep_size 3 does not divide the 4 experts"),
    "layer over no rank": (lambda: Layered(0), {}, "ep_size 0 does not divide the 4 experts"),
}  # fmt: skip


def _refusals() -> dict[str, str]:
    said = {}
    for name, (make, changes, _) in REFUSED.items():
        try:
            start(make(), {**config_of("stacked", 2, 1), **changes})
        except (ValueError, AssertionError) as error:
            said[name] = str(error)
    return said


def test_what_does_not_fit_is_refused_on_every_rank(pool2: Any) -> None:
    for said in pool2.run(_refusals):
        assert not [(n, said.get(n)) for n, (_, _, text) in REFUSED.items() if text not in said.get(n, "")]


def _groups_of_layer() -> tuple[Any, ...]:
    register_topology(None)  # an engine of another test that cut these ranks may still be there
    layer = deepspeed.moe.layer.MoE(HIDDEN, Expert(), 4, 2, k=1)
    layer.set_deepspeed_parallelism()
    name = layer.expert_group_name
    numbers = [n for n, _ in layer.named_parameters() if n.endswith("up.weight")]
    split = deepspeed.moe.utils.configure_moe_param_groups(layer.parameters())
    kinds = [(group.get("moe", False), group.get("name"), len(group["params"])) for group in split]
    return groups._get_expert_parallel_rank(name), numbers, kinds, deepspeed.moe.utils.has_moe_layers(layer)


def test_experts_are_numbered_over_all_ranks(pool2: Any) -> None:
    for rank, (index, numbers, kinds, found) in enumerate(pool2.run(_groups_of_layer)):
        assert index == rank and found == (True, 4)
        assert numbers == [f"deepspeed_moe.experts.deepspeed_experts.{2 * rank + i}.up.weight" for i in range(2)]
        assert kinds == [(False, None, 1), (True, "ep_size_2", 8)]


class Drawing(MoE):
    """Layer whose gate draws which tokens it drops."""

    def forward(self, hidden: Tensor, *_: Any) -> Any:
        return super().forward(hidden)[0]


def _drawn(ep: int, dropout: float) -> tuple[list[float], Tensor]:
    """Losses, and the gate's weight, where each rank has a seed of its own."""
    model = StackedLlama()
    expert = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(dropout))
    model.model.layers[-1].mlp = Drawing(HIDDEN, expert, 4, ep, capacity_factor=0.5, min_capacity=1)
    torch.manual_seed(dist.get_rank())
    engine, losses = start(model, config_of("layered", ep, 0, **_PARTS)), []
    for step in range(3):
        losses.append(engine(tokens_of(step, 0)))
        engine.backward(losses[-1])
        engine.step()
    gate = full_parameters(engine.module)["model.layers.1.mlp.deepspeed_moe.gate.wg.weight"]
    engine.destroy()
    return [float(loss.detach()) for loss in losses], gate


@pytest.mark.parametrize(("ep", "dropout"), [(1, 0.0), (2, 0.5)])
def test_ranks_that_share_layers_draw_the_same_for_gates_and_experts(pool2: Any, ep: int, dropout: float) -> None:
    """Though experts on each rank draw as many numbers as they have tokens."""
    (losses, gate), (losses_there, gate_there) = pool2.run(_drawn, ep, dropout)
    assert losses == losses_there and torch.equal(gate, gate_there)
