"""Experts at run time: loads are counted and evened out, the exchange overlaps, and what goes wrong is said."""

import contextlib
import csv
import logging
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.client.comm.groups import register_topology
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.errors import UsageError
from deepspeed.moe.exchange import through_experts
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import TopKGate
from deepspeed.tools.verify import ranks as processes
from deepspeed.utils import groups
from tests.dist.test_experts import ADAMW, DROPLESS, PREPARED, config_of
from tests.dist.test_late_norm import late
from tests.harness.experts import HIDDEN, Expert, Layered, Stacked, StackedLlama, tokens_of
from tests.harness.logs import logged
from tests.harness.pool import PatientPool, RankFailure, RankPool
from tests.harness.training import outcome, start

pytestmark = pytest.mark.timeout(180)
STEP = 0.05
BIASES = [f"layers.{i}.e_score_correction_bias" for i in range(2)]


def balanced(ep: int, stage: int, **changes: Any) -> dict[str, Any]:
    config = {**config_of("stacked", ep, stage), **changes}
    return {**config, "expert_parallel": {**config["expert_parallel"], "enabled": True, "load_balance_coeff": STEP}}


class Plain:
    """One process that sees the batches of all ranks, and moves the biases by the formula."""

    def __init__(self) -> None:
        self.model = Stacked().biased()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW["params"])  # type: ignore[arg-type]
        self.counts = [torch.zeros(8) for _ in self.model.layers]
        for layer, counts in zip(self.model.layers, self.counts, strict=True):
            layer.experts.register_forward_pre_hook(partial(self.count, counts))

    @staticmethod
    def count(counts: torch.Tensor, _: Any, args: tuple[torch.Tensor, ...]) -> None:
        counts += torch.bincount(args[1].flatten(), minlength=8)

    def step(self, batches: list[torch.Tensor]) -> list[list[int]]:
        self.optimizer.zero_grad()
        (sum(self.model(tokens) for tokens in batches) / len(batches)).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        loads = [[int(c) for c in counts] for counts in self.counts]
        for layer, counts in zip(self.model.layers, self.counts, strict=True):
            layer.e_score_correction_bias += STEP * torch.sign(counts.mean() - counts)
            counts.zero_()
        return loads


def one_step(engine: Any, step: int = 0) -> float:
    """Train one batch; its loss."""
    loss = engine(tokens_of(step, dist.get_rank()))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def bias_of(engine: Any) -> torch.Tensor:
    state = dict(engine.module.named_buffers())
    return torch.stack([state[name] for name in BIASES]).clone()


def steps_of(engine: Any, plain: Plain, steps: range) -> list[float]:
    """Differences of losses, loads and biases from one process."""
    rank, world, gas, apart = dist.get_rank(), dist.get_world_size(), 2, []
    for step in steps:
        batches = [tokens_of(gas * step + m, r) for m in range(gas) for r in range(world)]
        with torch.no_grad():
            wanted = float(plain.model(batches[rank]))
        for counts in plain.counts:
            counts.zero_()
        loads = plain.step(batches)
        for micro in range(gas):
            loss = engine(tokens_of(gas * step + micro, rank))
            apart.append(abs(float(loss.detach()) - wanted) if micro == 0 else 0.0)
            engine.backward(loss)
            engine.step()
        found = [load.experts for load in engine.expert_loads().values()]
        apart.append(float(found != loads))
        state = dict(plain.model.named_buffers())
        apart.append(float((bias_of(engine) - torch.stack([state[name] for name in BIASES])).abs().max()))
    return apart


def bias_at_any_layout(folder: str) -> list[float]:
    plain = Plain()
    engine = start(Stacked().biased(), balanced(2, 3, gradient_accumulation_steps=2))
    apart = steps_of(engine, plain, range(2))
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = start(Stacked(seed=8).biased(), balanced(4, 1, gradient_accumulation_steps=2))
    engine.load_checkpoint(folder)
    apart += steps_of(engine, plain, range(2, 4))
    engine.destroy()
    return apart


def test_the_bias_follows_the_loads_of_all_ranks_and_micro_batches_also_in_another_layout(
    pool4: RankPool, tmp_path: Path
) -> None:
    for apart in pool4.run(bias_at_any_layout, str(tmp_path)):
        assert max(apart) < 2e-6, apart


def skipped(*, behind: bool) -> list[list[float]]:
    """Biases after each of four updates, of which the second is left out."""
    with late() if behind else contextlib.nullcontext():
        engine = start(Stacked().biased(), balanced(2, 1))
        seen = []
        for step in range(4):
            loss = engine(tokens_of(step, dist.get_rank()))
            engine.backward(loss * float("inf") if step == 1 else loss)
            engine.step()
            seen.append(bias_of(engine).flatten().tolist())
        assert engine.skipped_steps == 1
        engine.destroy()
        return seen


@pytest.mark.parametrize("behind", [False, True])
def test_a_skipped_step_leaves_the_bias_and_ranks_agree_on_it(pool2: RankPool, *, behind: bool) -> None:
    one, two = pool2.run(skipped, behind=behind)
    assert one == two and one[0] == one[1] and one[1] != one[2]


def evened() -> list[float]:
    """Skew of the one layer, whose router prefers some experts, in each window; nothing else is trained."""
    config = balanced(2, 1, optimizer={"type": "AdamW", "params": {"lr": 0.0}}, bf16={"enabled": True})
    config["expert_parallel"]["load_balance_coeff"] = 0.01
    engine, skews = start(Stacked(blocks=1, k=1).biased(), config), []
    for _ in range(30):
        one_step(engine)
        skews += [load.skew for load in engine.expert_loads().values()]
    assert bias_of_first(engine).dtype == torch.float32
    engine.destroy()
    return skews


def bias_of_first(engine: Any) -> torch.Tensor:
    return dict(engine.module.named_buffers())[BIASES[0]]


def test_the_bias_evens_out_loads(pool2: RankPool) -> None:
    for skews in pool2.run(evened):
        assert min(skews[-4:]) < 0.75 * skews[0], skews


def counted(folder: str) -> tuple[dict[str, Any], list[Any], int]:
    """Loads of a capped layer, as told and as the gates chose; updates that were written."""
    options = {**DROPLESS, "drop_tokens": True, "min_capacity": 2, "capacity_factor": 0.5}
    monitor = {"enabled": True, "output_path": folder, "job_name": "loads"}
    engine = start(Layered(2, **options), config_of("layered", 2, 1, csv_monitor=monitor))
    chosen: list[Any] = []
    gates = [layer.deepspeed_moe.gate for layer in engine.module.layers]
    for gate in gates:
        route = gate.route
        gate.route = lambda *args, route=route: chosen.append(route(*args)) or chosen[-1]
    one_step(engine)
    engine.eval()
    engine(tokens_of(1, dist.get_rank()))  # not counted
    loads = {path: (*load, load.skew, load.rank_skew) for path, load in engine.expert_loads().items()}
    kept = [torch.bincount(r.chosen[r.chosen >= 0], minlength=4).tolist() for r in chosen[:2]]
    dropped = [int(r.counts.sum() - (r.chosen >= 0).sum()) for r in chosen[:2]]
    engine.destroy()
    return loads, [kept, dropped], len(os.listdir(f"{folder}/loads")) if dist.get_rank() == 0 else 0


def test_loads_of_all_ranks_go_to_the_monitor_with_what_was_dropped(pool2: RankPool, tmp_path: Path) -> None:
    (loads, one, _), (other, two, _) = pool2.run(counted, str(tmp_path))
    assert loads == other and list(loads) == ["layers.0", "layers.1"]
    for i, (experts, ranks, dropped, skew, rank_skew) in enumerate(loads.values()):
        assert experts == [a + b for a, b in zip(one[0][i], two[0][i], strict=True)]
        assert ranks == [experts[0] + experts[1], experts[2] + experts[3]]
        assert dropped == one[1][i] + two[1][i] > 0
        assert skew == 4 * max(experts) / sum(experts) and rank_skew == 2 * max(ranks) / sum(ranks)
    written = {file.stem: [*csv.reader(file.read_text().splitlines())] for file in (tmp_path / "loads").glob("*.csv")}
    of_all = {name.rpartition("Samples_")[2]: float(rows[1][1]) for name, rows in written.items()}
    assert of_all["expert_dropped"] == sum(load[2] for load in loads.values())
    assert of_all["expert_skew"] == pytest.approx(max(load[3] for load in loads.values()))
    first, (experts, ranks, *_) = next(iter(loads.items()))
    assert of_all[f"expert_load_{first}_3"] == experts[3] and of_all[f"expert_load_{first}_rank_1"] == ranks[1]


def folded() -> tuple[int, list[float]]:
    """Choices that were counted where two ranks have the same tokens, and the bias."""
    model = StackedLlama()
    block = model.model.layers[-1].mlp
    del block.e_score_correction_bias
    block.register_buffer("e_score_correction_bias", torch.zeros(4))
    engine = start(model, balanced(4, 3, tensor_parallel={"autotp_size": 2}))
    engine.backward(engine(tokens_of(0, dist.get_rank() // 2)))
    engine.step()
    (load,) = engine.expert_loads().values()
    bias = block.e_score_correction_bias.tolist()
    engine.destroy()
    return sum(load.experts), bias


def test_tokens_that_several_ranks_have_count_once(pool4: RankPool) -> None:
    results = pool4.run(folded)
    assert {total for total, _ in results} == {2 * 2 * 6 * 2}  # data-parallel ranks, rows, tokens, choices
    assert all(bias == results[0][1] and any(bias) for _, bias in results)


def recomputed() -> tuple[int, str]:
    model = Stacked().biased()
    PREPARED["recomputed"](model)
    engine = start(model, balanced(2, 3))
    one_step(engine)
    total = sum(next(iter(engine.expert_loads().values())).experts)
    engine.destroy()
    engine = start(Stacked(), config_of("stacked", 2, 1))
    silent = not any(layer.experts._forward_pre_hooks for layer in engine.module.layers)
    said = outcome(engine.expert_loads)
    engine.destroy()
    return total, said if silent else "hooks of counters are there"


def test_a_recomputation_counts_once_and_nothing_is_counted_unasked(pool2: RankPool) -> None:
    for total, said in pool2.run(recomputed):
        assert total == 2 * 2 * 6 * 2  # ranks, rows, tokens, choices
        assert "UsageError" in said and "loads are not counted" in said


# -- the exchange -----------------------------------------------------------------------------------------------------
def order_of_events() -> list[str]:
    """What begins, ends and is computed in one layer with a dense branch, forward and backward."""
    torch.manual_seed(1)
    register_topology(None)  # an engine of another test that cut these ranks may still be there
    layer = MoE(HIDDEN, Expert(), 4, 2, k=2, use_residual=True, **{k: v for k, v in DROPLESS.items() if k != "k"})
    layer.set_deepspeed_parallelism()
    seen: list[str] = []

    def listen(op: str, *_: Any) -> Any:
        seen.append(f"begin {op}")
        return lambda: seen.append(f"end {op}")

    assert layer.deepspeed_moe.group is not None
    layer.deepspeed_moe.group.ledger.append(listen)
    layer.mlp.register_forward_hook(lambda *_: seen.append("dense"))
    layer.mlp.register_full_backward_hook(lambda *_: seen.append("dense backward"))
    out, _, _ = layer(torch.randn(10, HIDDEN, requires_grad=True))
    seen.append("backward")
    out.sum().backward()
    return seen


def test_the_dense_branch_is_computed_while_tokens_and_gradients_travel(pool2: RankPool) -> None:
    begin, end = "begin all_to_all", "end all_to_all"
    forward = [begin, end, *[begin] * 3, "dense", *[end] * 3, begin, end]
    for seen in pool2.run(order_of_events):
        at = seen.index("backward")
        assert seen[:at] == forward
        back = seen[at + 1 :]
        dense = back.index("dense backward")
        under_way = Counter(back[:dense])
        assert under_way[begin] - under_way[end] == 2 and Counter(back)[begin] == Counter(back)[end] == 3, back


def _spoilt(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return args[0] * float("nan"), *args[1:]


def spoils(kind: str, stage: int) -> tuple[str, float]:
    """What a rank hears of a batch in which the second rank's values have run away; the loss of the next batch."""
    model: Any = Stacked() if kind == "stacked" else Layered(2, **DROPLESS)
    engine = start(model, config_of(kind, 2, stage))

    def batch(step: int) -> float:
        return one_step(engine, step)

    batch(0)
    with contextlib.ExitStack() as spoilt:
        if dist.get_rank() == 1:
            spoilt.callback(model.layers[1].register_forward_pre_hook(_spoilt).remove)
        said = outcome(lambda: batch(1))
    loss = batch(1)
    engine.destroy()
    return said, loss


@pytest.mark.parametrize(("kind", "stage"), [("stacked", 1), ("layered", 3)])
def test_scores_that_are_not_finite_are_said_on_every_rank_with_the_layer(
    pool4: RankPool, kind: str, stage: int
) -> None:
    for rank, (said, loss) in enumerate(pool4.run(spoils, kind, stage)):
        assert "the router of layers.1" in said and "not finite" in said and "for tokens of rank 1" in said, said
        assert ("UsageError" in said) == (rank < 2) and loss > 0, said


def test_scores_that_are_not_finite_are_said_where_all_experts_are_here() -> None:
    layer = MoE(HIDDEN, Expert(), 4)
    with pytest.raises(UsageError, match="the router of a layer of experts answered scores that are not finite"):
        layer(torch.full((3, HIDDEN), float("nan")))


def meet() -> list[str]:
    """What a rank hears where ranks come to an exchange from different places, and where they do not."""
    job = plain_mesh("gloo").job
    hidden, index, weights = torch.randn(3, HIDDEN), torch.tensor([[0], [1], [1]]), torch.ones(3, 1)

    def exchange(layer: str, *, trains: bool) -> str:
        def run() -> torch.Tensor:
            return through_experts(hidden, index, weights, group=job, experts=1, compute=compute, layer=layer)

        with torch.set_grad_enabled(trains):
            return outcome(run)

    def compute(rows: torch.Tensor, _: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return rows * scales

    places = [("layers.0", job.index == 0), (f"layers.{job.index}", True), ("layers.0", True), ("layers.1", False)]
    return [exchange(layer, trains=trains) for layer, trains in places]


def test_ranks_in_different_forwards_or_layers_do_not_mix_their_tokens(pool2: RankPool) -> None:
    for rank, (mode, layer, *same) in enumerate(pool2.run(meet)):
        assert "UsageError" in mode and "with gradients on rank 0, without them" in mode and "layers.0" in mode
        assert "UsageError" in layer and f"this rank is in layers.{rank}, others" in layer
        assert not [said for said in same if "Error" in said]


def one_needs_gradients() -> torch.Tensor | None:
    """Gradients of tokens of the first rank, half of which the other rank's expert doubles; the other needs none."""
    job = plain_mesh("gloo").job
    hidden = torch.ones(4, HIDDEN, requires_grad=job.index == 0)

    def compute(rows: torch.Tensor, _: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return rows * scales * (1 + job.index)

    index, weights = torch.tensor([[0], [0], [1], [1]]), torch.ones(4, 1)
    through_experts(hidden, index, weights, group=job, experts=1, compute=compute).sum().backward()
    return hidden.grad


def test_a_rank_whose_tokens_need_no_gradient_returns_those_of_other_ranks(pool2: RankPool) -> None:
    found, nothing = pool2.run(one_needs_gradients, time_limit=30)
    assert nothing is None and found[:, 0].tolist() == [1, 1, 2, 2]


def compiled(kind: str, stage: int) -> list[list[float]]:
    """Losses of two steps with graphs of a compiler, and without."""
    runs = []
    for compiles in (True, False):
        model: Any = Stacked() if kind == "stacked" else Layered(2, **DROPLESS)
        engine = start(model, config_of(kind, 2, stage))
        if compiles:
            engine.compile(backend="eager")
        runs.append([one_step(engine, step) for step in range(2)])
        engine.destroy()
    return runs


@pytest.mark.parametrize(("kind", "stage"), [("stacked", 1), ("layered", 3)])
def test_a_compiled_model_with_experts_over_ranks_trains_as_it_does_uncompiled(
    pool2: RankPool, kind: str, stage: int
) -> None:
    for one, two in pool2.run(compiled, kind, stage, time_limit=120):
        assert one == pytest.approx(two, abs=1e-6)


def _dies(_: Any, args: tuple[torch.Tensor, ...]) -> None:
    """End this rank when the tokens of the others have come, and before it returns anything."""
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_an_exchange(on: int, stage: int) -> None:
    engine = start(Layered(2, **DROPLESS), config_of("layered", 2, stage))
    one_step(engine)
    if dist.get_rank() == on:
        expert = next(engine.module.layers[1].deepspeed_moe.experts.deepspeed_experts.children())
        expert.register_forward_pre_hook(_dies)
    raise RuntimeError(outcome(lambda: engine.backward(engine(tokens_of(1, dist.get_rank())))))


@pytest.mark.in_make_test("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_dies_inside_an_exchange_ends_all_with_its_name(
    monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 60)
    with PatientPool(4) as pool, pytest.raises(RankFailure) as caught:
        pool.run(dies_in_an_exchange, 1, stage, time_limit=120)
    text = str(caught.value)
    assert text.count("RankFailedError") == 3 and text.count("rank 1 does not answer any more") == 3, text
    assert caught.value.types == {rank: "died" if rank == 1 else "RuntimeError" for rank in range(4)}, text


# -- names ------------------------------------------------------------------------------------------------------------
def groups_of_ranks(local: int) -> dict[str, list[int]]:
    """Ranks of the groups of experts with neighbours that hold the same ones; of a machine of so many ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    found = {name: dist.get_process_group_ranks(pg) for name, pg in groups._get_local_all_to_all_group().items()}
    engine = start(Stacked(), {**config_of("stacked", 2, 1), "use_data_before_expert_parallelism": True})
    found["engine"] = list(engine.mesh.experts[0].ranks)
    found["ep"] = dist.get_process_group_ranks(groups._get_expert_parallel_group("ep_size_2"))
    engine.destroy()
    found["after"] = dist.get_process_group_ranks(groups._get_expert_parallel_group("ep_size_2"))
    layer = MoE(HIDDEN, Expert(), 4, 2)
    layer.set_deepspeed_parallelism(use_data_before_expert_parallel_=True)
    assert layer.deepspeed_moe.group is not None
    found["layer"] = list(layer.deepspeed_moe.group.ranks)
    groups._create_expert_data_and_model_parallel(2, use_data_before_expert_parallel_=False)
    found["told"] = dist.get_process_group_ranks(groups._get_expert_parallel_group("ep_size_2"))
    return found


def test_neighbours_may_hold_the_same_experts_and_machines_have_groups(pool4: RankPool) -> None:
    for rank, found in enumerate(pool4.run(groups_of_ranks, 2)):
        apart, neighbours = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found.pop(f"local_{rank // 2}") == neighbours and found.pop(f"global_{rank % 2}") == apart
        assert found == {"engine": apart, "ep": apart, "after": neighbours, "layer": apart, "told": neighbours}


def experts_from_files(folder: str) -> tuple[bool, int, str]:
    """Experts of a checkpoint that two ranks have written, as each rank and as a lone model reads them."""
    engine = start(Layered(2, **DROPLESS), config_of("layered", 2, 1))
    engine._save_moe_checkpoint(folder, tag="moe")
    state = {"other": 1}
    deepspeed.DeepSpeedEngine.load_moe_state_dict(folder, "moe", state, False, model=engine.module)
    local = {n: p for n, p in engine.module.named_parameters() if "deepspeed_experts" in n}
    same = state.pop("other") == 1 and state.keys() == local.keys()
    same = same and all(torch.equal(state[n], p) for n, p in local.items())
    everything: dict[str, Any] = {}
    engine.load_moe_state_dict(folder, None, everything)
    wanted = Layered(1, **DROPLESS).state_dict()
    same = same and all(torch.equal(value, wanted[n]) for n, value in everything.items())
    said = outcome(lambda: engine.load_moe_state_dict(folder, "moe", {}, model=Layered(1, experts=6)))
    engine.destroy()
    return same, len(everything), said


def test_experts_are_read_into_a_state_dict_by_name(pool2: RankPool, tmp_path: Path) -> None:
    for same, number, said in pool2.run(experts_from_files, str(tmp_path)):
        assert same and number == 2 * 4 * 4
        assert "CheckpointError" in said and "lacks layers.0.deepspeed_moe.experts.deepspeed_experts.4" in said


def said_at_start() -> list[str]:
    """What is logged of the parameters of either kind of model."""
    models: dict[str, Any] = {"stacked": Stacked(), "layered": Layered(2)}
    with logged(set_level=logging.INFO) as lines:
        for kind, model in models.items():
            start(model, config_of(kind, 2, 3)).destroy()
    return [line for line in lines if "parameters in" in line]


def test_the_first_line_counts_the_experts_of_all_ranks(pool2: RankPool) -> None:
    numbers = [sum(p.numel() for p in model.parameters()) for model in (Stacked(), Layered(1))]
    for line, number in zip(pool2.run(said_at_start)[0], numbers, strict=True):
        assert f"{number:,} parameters in" in line


def test_a_gate_computes_in_fp32_under_autocast() -> None:
    torch.manual_seed(0)
    gate, tokens = TopKGate(HIDDEN, 8, k=2, top2_2nd_expert_sampling=False), torch.randn(256, HIDDEN)
    wanted = gate.route(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        found = gate.route(tokens)
    assert torch.equal(found.chosen, wanted.chosen) and torch.equal(found.weights, wanted.weights)
