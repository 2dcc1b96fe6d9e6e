"""Sequences over ranks: losses, gradients, norms and parameters equal one process, whatever stage, heads, length."""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from deepspeed.errors import SequenceError
from deepspeed.sequence.batch import UlyssesSPDataLoaderAdapter, part_of, whole_batch
from deepspeed.sequence.heads import plan_heads
from deepspeed.sequence.layer import DistributedAttention, single_all_to_all
from deepspeed.tools.verify.grads import scaled_error
from deepspeed.utils import groups
from tests.harness.beside import Beside
from tests.harness.faults import modules_replaced
from tests.harness.logs import logged
from tests.harness.pool import PatientPool, RankFailure, RankPool
from tests.harness.sequences import ROWS, WORDS, batch_of, decoder, stand_in
from tests.harness.training import make_config, outcome, start

pytestmark = pytest.mark.timeout(180)
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}


def config_of(sp: int, stage: int, **changes: Any) -> dict[str, Any]:
    return make_config(
        stage,
        optimizer={"type": "AdamW", "params": ADAM},
        gradient_clipping=0.5,
        sequence_parallel_size=sp,
        train_micro_batch_size_per_gpu=ROWS,
        **changes,
    )


def _part(batch: dict[str, Any], group: Any) -> dict[str, Any]:
    """This rank's part of ``batch``, as the adapter delivers it."""
    ids = batch["input_ids"]
    whole = whole_batch(batch, ids, group.size)
    del whole["labels"]
    return part_of(whole, ids, group.index, group.size)


def parity(
    sp: int, stage: int, kind: str, model: dict[str, Any], changes: dict[str, Any] | None = None
) -> dict[str, float]:
    """Train two steps beside one process that sees the batches of all ranks; return the largest errors."""
    changes = dict(changes or {})
    recomputes, cuts = changes.pop("recomputes", False), changes.pop("cuts", False)
    pull, total_op = changes.pop("penalty", 0.0), changes.get("gradient_allreduce_op") == "sum"
    gas = changes.get("gradient_accumulation_steps", 1)

    def penalty(model: nn.Module) -> Any:
        return pull * sum(param.square().sum() for param in model.parameters()) if pull else 0.0

    with modules_replaced({"transformers": stand_in}):
        ours, plain = decoder(**model), decoder(**{**model, "attention": "sdpa"})
        ours.recomputes = recomputes
        engine = start(ours, config_of(sp, stage, **changes))
        feeds, feed = engine.mesh.data.size, engine.mesh.data.index
        optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
        worst, weighed = Beside(engine, plain, optimizer), engine._config.normalize != "micro_batches"
        for step in range(2):
            optimizer.zero_grad()
            total = 0
            for micro in range(gas):
                batches = [batch_of(kind, gas * step + micro, f) for f in range(feeds)]
                losses = [plain(**batch)["loss"] + penalty(plain) for batch in batches]
                weights = [int((b["labels"][:, 1:] != -100).sum()) if weighed else 1 for b in batches]
                sum(loss * weight for loss, weight in zip(losses, weights, strict=True)).backward()
                loss = engine(**(_part(batches[feed], engine.mesh.sp) if cuts else batches[feed]))["loss"]
                loss = loss + penalty(engine)
                engine.backward(loss)
                worst.loss(loss, losses[feed])
                total += sum(weights)
                if micro < gas - 1:
                    engine.step()
            for param in plain.parameters():
                param.grad /= 1 if total_op else total
            if not weighed:
                worst.gradients()
            worst.update()
        worst.parameters()
        engine.destroy()
        worst.note("given back", float(ours.config._attn_implementation != model.get("attention", "sdpa")))
    return worst


TENSOR = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [
    {"patterns": [r"layers\.\d\.[qkv]_proj"]},
    {"patterns": [r"layers\.\d\.o_proj"], "partition_type": "row"},
], "use_default_specs": False}}}  # fmt: skip
GROUPED, UNEVEN, BOTH = {"heads": 4, "keys": 1}, {"heads": 6, "keys": 2}, {"heads": 6, "keys": 6}


def _by(attention: str) -> dict[str, Any]:
    return {"sequence": {"attention": attention}}


CELLS: dict[str, tuple[Any, ...]] = {
    "sp 2, stage 0": (2, 0, "plain", {}),
    "sp 2, stage 1, beside data parallelism": (2, 1, "odd", GROUPED),
    "sp 2, stage 2, packed": (2, 2, "packed", {}),
    "sp 4, stage 0, packed, heads of keys on several ranks": (4, 0, "packed", GROUPED),
    "sp 4, stage 1, odd length, heads that ranks do not divide": (4, 1, "odd", UNEVEN),
    "sp 4, stage 2, padded": (4, 2, "padded", BOTH),
    "a sequence shorter than its ranks": (4, 3, "short", {}),
    "targets on one rank only": (4, 2, "no targets", {}),
    "a window": (2, 2, "odd", {"window": 5}),
    "a window in packed rows": (4, 3, "packed", {"window": 5, **GROUPED}),
    "by kernels that are told where documents end": (2, 3, "packed", {"window": 5, "attention": "flash"}),
    "the same, rows that are documents": (4, 1, "odd", {"attention": "flash", **UNEVEN}),
    "by kernels for masks of blocks": (2, 2, "padded", {"window": 5, "attention": "flex"}),
    "recomputed, accumulated": (2, 3, "packed", {}, {"recomputes": True, "gradient_accumulation_steps": 2}),
    "weighed by tokens": (2, 1, "plain", {}, {"normalize": "next_tokens", "gradient_accumulation_steps": 2}),
    "parts that were cut before, weighed by tokens": (
        4, 3, "packed", {}, {"cuts": True, "normalize": "next_tokens", "gradient_accumulation_steps": 2}
    ),
    "parts that were cut before, of an odd length": (2, 1, "odd", UNEVEN, {"cuts": True}),
    "beside tensor parallelism": (2, 3, "odd", {}, TENSOR),
    "a penalty that the client adds": (2, 1, "odd", {}, {"penalty": 0.03, "gradient_accumulation_steps": 2}),
    "a penalty, weighed by tokens, parts that were cut before": (
        4, 1, "packed", {}, {"penalty": 0.03, "cuts": True, "normalize": "next_tokens"}
    ),
    "a penalty, gradients summed over batches": (2, 2, "plain", {}, {"penalty": 0.03, "gradient_allreduce_op": "sum"}),
    "a ring of fewer heads than ranks": (4, 3, "odd", {"heads": 2, "keys": 1}),
    "a ring, windows in packed rows": (4, 2, "packed", {"heads": 1, "keys": 1, "window": 5}),
    "a ring alone, padded, recomputed": (2, 1, "padded left", {}, {"recomputes": True, **_by("ring")}),
    "heads and a ring, packed": (4, 3, "packed", GROUPED, _by("both")),
    "heads and a ring, a sequence shorter than its ranks": (4, 1, "short", GROUPED, _by("both")),
    "a ring of parts that were cut before": (4, 2, "packed", {"window": 5}, {"cuts": True, **_by("ring")}),
    "optimizer in host memory": (2, 2, "odd", {}, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
}  # fmt: skip


SHOWN_BY_OTHERS = {"a penalty that the client adds", "optimizer in host memory"}  # other penalties; states on a drive


@pytest.mark.in_make_test(*(CELLS.keys() - SHOWN_BY_OTHERS))
@pytest.mark.parametrize("cell", CELLS)
def test_training_equals_one_process(pool4: RankPool, cell: str) -> None:
    for errors in pool4.run(parity, *CELLS[cell]):
        assert max(errors.values()) <= 2e-6, errors


def _read(attention: str) -> tuple[list[int], list[float]]:
    """Positions of this rank's tokens, and how far its logits are from those of one process."""
    with modules_replaced({"transformers": stand_in}):
        model, plain, batch = decoder(), decoder(), batch_of("odd", 0, 0)
        engine, seen = start(model, config_of(4, 1, **_by(attention))), list[torch.Tensor]()
        engine.module.positions.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        logits, whole = engine(**batch)["logits"], plain(**batch)["logits"]
        engine.destroy()
    return seen[0][0].tolist(), float((logits - whole[:, seen[0][0]]).abs().max().detach())


@pytest.mark.parametrize("attention", ["ring", "both"])
def test_a_rank_of_a_ring_has_tokens_of_the_front_and_of_the_end(pool4: RankPool, attention: str) -> None:
    ring = [0, 1, 11, 12], [2, 3, 10], [4, 5, 9], [6, 7, 8]
    both = [0, 1, 2, 3], [10, 11, 12], [4, 5, 6], [7, 8, 9]
    for (tokens, error), expected in zip(
        pool4.run(_read, attention), {"ring": ring, "both": both}[attention], strict=True
    ):
        assert tokens == expected and error < 2e-6


class _Attending(torch.nn.Module):
    """Attention of a client's own, by ``DistributedAttention`` in either order of dimensions."""

    def __init__(self, group: Any, *, tokens_first: bool, heads: int, keys: int) -> None:
        super().__init__()
        self.tokens_first, self.heads, self.keys = tokens_first, heads, keys
        self.q, self.kv = torch.nn.Linear(8, heads * 6), torch.nn.Linear(8, 2 * keys * 6)
        self.o = torch.nn.Linear(heads * 6, 1)
        self.attend = DistributedAttention(self.local, group, 2, 0 if tokens_first else 1)

    def local(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float = 0.0) -> torch.Tensor:
        """Causal attention of [tokens, rows, heads, width] or [rows, tokens, heads, width]."""
        q *= 0.5  # a client may write into what it gets
        order = (1, 2, 0, 3) if self.tokens_first else (0, 2, 1, 3)
        q, k, v = (part.permute(order) for part in (q, k, v))
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.permute((2, 0, 1, 3) if self.tokens_first else (0, 2, 1, 3))

    def forward(self, hidden: torch.Tensor, turned: Any) -> torch.Tensor:
        q = self.q(hidden).unflatten(-1, (self.heads, 6))
        k, v = self.kv(hidden).unflatten(-1, (2 * self.keys, 6)).chunk(2, dim=2)
        out = self.attend(q, k, v, 1 if self.tokens_first else 0, turned, scale=0.3)
        return self.o(out.flatten(2)).square().sum()


def attending(tokens_first: bool, heads: int, keys: int) -> float:  # noqa: FBT001
    """The worst gradient of a client's attention over four ranks, beside one process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(2)
    single = dist.new_group([rank], use_local_synchronization=True)
    ours, alone = (
        _Attending(group, tokens_first=tokens_first, heads=heads, keys=keys) for group in (dist.group.WORLD, single)
    )
    alone.load_state_dict(ours.state_dict())
    angle = torch.rand(8, 2)
    turns = [torch.cat([fn(angle)] * 2, -1)[:, None, None] for fn in (torch.cos, torch.sin)]
    hidden = torch.randn(8, 3, 8)
    if not tokens_first:
        hidden, turns = hidden.transpose(0, 1), [turn.transpose(0, 1) for turn in turns]
    mine = hidden.chunk(world, 0 if tokens_first else 1)[rank]
    ours(mine, turns).backward()
    alone(hidden, turns).backward()
    for param in ours.parameters():
        dist.all_reduce(param.grad)
    pairs = zip(ours.parameters(), alone.parameters(), strict=True)
    return max(scaled_error(a.grad, b.grad) for a, b in pairs)


@pytest.mark.parametrize(("tokens_first", "heads", "keys"), [(True, 4, 4), (False, 6, 3), (False, 8, 2)])
def test_attention_of_a_client_equals_one_process(pool4: RankPool, tokens_first: bool, heads: int, keys: int) -> None:  # noqa: FBT001
    assert max(pool4.run(attending, tokens_first, heads, keys)) <= 2e-6


def _refused(turn: int, of_rank: tuple[int, ...], of_others: tuple[int, ...], *, alone: bool) -> list[str]:
    """What each of three calls says of which one is wrong, and whether the next is right again."""
    attend, said = DistributedAttention(lambda q, k, v: q + k + v, dist.group.WORLD, 2, 1), []
    for call in range(3):
        shape = of_rank if call == turn and dist.get_rank() == 1 else of_others
        value = torch.ones(shape)
        try:
            output = single_all_to_all(value, 2, 1, 0, dist.group.WORLD) if alone else attend(*(value,) * 3, 0)
            said.append(str(tuple(output.shape)))
        except SequenceError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "alone"), [((1, 5, 4, 2), False), ((1, 4, 3, 2), False), ((4, 4, 2), False), ((1, 4, 3, 2), True)]
)
def test_shapes_that_differ_between_ranks_are_refused_on_each(
    pool2: RankPool, wrong: tuple[int, ...], *, alone: bool, turn: int
) -> None:
    for said in pool2.run(_refused, turn, wrong, (1, 4, 4, 2), alone=alone):
        text = said.pop(turn)
        assert said == [str((1, 8, 2, 2) if alone else (1, 4, 4, 2))] * 2
        assert str(list(wrong)) in text or "4 dimensions" in text


def _said(model: str) -> list[str]:
    """What is logged above INFO where ranks share the sequences of a model that is none of Transformers."""
    changed = (
        _Attending(dist.group.WORLD, tokens_first=True, heads=4, keys=4)
        if model == "divides"
        else torch.nn.Linear(4, 4)
    )
    with logged(logging.WARNING) as lines:
        start(changed, config_of(dist.get_world_size(), 1)).destroy()
    return [line for line in lines if "sequence_parallel_size" in line]


def test_a_model_that_divides_no_attention_is_warned_of_summed_gradients(pool2: RankPool) -> None:
    alone, divides = (pool2.run(_said, model)[0] for model in ("alone", "divides"))
    assert "Linear is no model of Transformers" in alone[0] and "gradients are summed" in alone[0]
    assert not divides


def _turned() -> tuple[bool, float]:
    """Whether an exchange, heads uneven, gives all tokens of some heads; and how far its undoing is from the input."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.randn(2, 8, 6, 3, generator=torch.Generator().manual_seed(1))
    mine = whole.chunk(world, 1)[rank].clone().requires_grad_()
    some = single_all_to_all(mine, 2, 1, 0, dist.group.WORLD)
    first = plan_heads(6, 6, world).queries[rank]
    back = single_all_to_all(some, 1, 2, 0, dist.group.WORLD)
    back.square().sum().backward()
    assert mine.grad is not None
    right = torch.equal(some, whole[:, :, first.start : first.stop]) and torch.equal(mine.grad, 2 * mine.detach())
    return right, float((back - mine).abs().max())


def test_an_exchange_turns_tokens_into_heads_and_back(pool4: RankPool) -> None:
    assert pool4.run(_turned) == [(True, 0.0)] * 4


def _asked() -> dict[str, Any]:
    with modules_replaced({"transformers": stand_in}):
        engine = start(decoder(), config_of(2, 1, data_parallel_size=2))
        said = {
            family: tuple(getattr(groups, f"_get_{family}_{what}")() for what in ("world_size", "rank"))
            for family in ("sequence_parallel", "sequence_data_parallel", "data_parallel")
        }
        ranks = dist.get_process_group_ranks(groups._get_sequence_parallel_group())
        said |= {"ranks": ranks, "batch": engine.train_batch_size(), "shards": engine.mesh.groups[0].size}
        loader = engine.deepspeed_io([{"n": n} for n in range(8)], batch_size=2)
        said["loaded"] = [batch["n"].tolist() for batch in loader]
        engine.destroy()
    return said


def test_the_ranks_of_a_sequence_are_consecutive_and_share_batches_and_shards(pool4: RankPool) -> None:
    said = pool4.run(_asked)
    for rank, one in enumerate(said):
        wanted = {
            "sequence_parallel": (2, rank % 2),
            "sequence_data_parallel": (4, rank),
            "data_parallel": (2, rank // 2),
        }
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert one | wanted | {"ranks": pair, "batch": 2 * ROWS, "shards": 4} == one
    assert said[0]["loaded"] == said[1]["loaded"] != said[2]["loaded"] == said[3]["loaded"]


def _adapted(labels: bool, tokens: int) -> Any:  # noqa: FBT001
    group, rank = dist.group.WORLD, dist.get_rank()
    ids = torch.arange(tokens)[None] + 100 * rank
    row = {"input_ids": ids, "position_ids": torch.arange(tokens)[None]} | ({"labels": ids} if labels else {})
    loader = UlyssesSPDataLoaderAdapter([row], rank, group, dist.get_world_size(), torch.device("cpu"))
    try:
        return len(loader), [{name: value[0].tolist() for name, value in batch.items()} for batch in loader]
    except ValueError as error:
        return str(error)


def test_the_adapter_cuts_the_batch_of_each_rank_with_targets_from_across_the_border(pool2: RankPool) -> None:
    for rank, (length, batches) in enumerate(pool2.run(_adapted, True, 4)):
        assert length == 2
        for owner, batch in enumerate(batches):
            ids = [100 * owner + n for n in (0, 1, 2, 3, -100)]
            ids[4] = -100
            part = slice(2 * rank, 2 * rank + 2)
            assert batch == {
                "input_ids": ids[part],
                "position_ids": [0, 1, 2, 3][part],
                "shift_labels": ids[1:][part],
            }


def test_the_adapter_refuses_on_every_rank_what_it_cannot_cut(pool2: RankPool) -> None:
    for text in pool2.run(_adapted, False, 4):
        assert "rank 0: the batch has no tensor 'labels'" in text
    for text in pool2.run(_adapted, True, 5):
        assert "5 tokens do not divide over 2 ranks" in text


class _OwnAttention(torch.nn.Module):
    """A model that the engine cannot cut batches for: its caller does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 4)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.embed(input_ids).square().mean()}


def _rates(kind: str, folder: str) -> list[float]:
    """Tokens a sample, by the figures of each update."""
    found: dict[str, list[float]] = {}
    with modules_replaced({"transformers": stand_in}):
        monitor = {"enabled": True, "output_file": f"{folder}/{dist.get_rank()}.prom"}
        model = _OwnAttention() if kind == "of its own" else decoder()
        engine = start(model, config_of(2, 1, prometheus=monitor))
        engine.monitor.write_events = lambda events: [found.setdefault(n, []).append(v) for n, v, _ in events]
        for step in range(2):
            batch = batch_of("plain", step, engine.mesh.data.index)
            if kind != "whole":
                batch = _part(batch, engine.mesh.sp)
            if kind == "of its own":
                batch = {"input_ids": batch["input_ids"], "labels": batch["shift_labels"]}
            engine.backward(engine(**batch)["loss"])
            engine.step()
        engine.destroy()
    pairs = zip(found["Train/Samples/tokens_per_s"], found["Train/Samples/samples_per_s"], strict=True)
    return [tokens / samples for tokens, samples in pairs]


@pytest.mark.parametrize("kind", ["whole", "in parts", "of its own"])
def test_rates_count_every_token_of_a_shared_sequence_once(pool4: RankPool, tmp_path: Path, kind: str) -> None:
    assert pool4.run(_rates, kind, str(tmp_path))[0] == pytest.approx([16.0])


def _refused_at_start() -> dict[str, str]:
    """What ``initialize`` says of models and configurations that do not fit."""
    models = {fault: decoder() for fault in AT_START} | {"heads": decoder(heads=2, keys=2)}
    models["eager"].config._attn_implementation_internal = "eager"
    models["state"].config.layer_types = ["full_attention", "linear_attention"]
    models["unshifted"].loss_type = "ForTokenClassification"
    changes: dict[str, dict[str, Any]] = {
        "heads": {"sequence": {"attention": "ulysses"}},
        "data": {"data_parallel_size": 3},
        "ranks": {"sequence_parallel_size": 3},
    }
    said = {}
    with modules_replaced({"transformers": stand_in}):
        for fault, model in models.items():
            options = {"mesh_param": (2, 2)} if fault == "mesh" else {}
            said[fault] = outcome(partial(start, model, config_of(4, 1) | changes.get(fault, {}), **options))
    return said


AT_START = {
    "heads": "has 2 attention heads, and each rank needs one. Set sequence_parallel_size to 2 or less",
    "eager": "attention 'eager' cannot be divided",
    "state": "has layers of the kind linear_attention",
    "unshifted": "labels of Decoder are not those of the next tokens (its loss is ForTokenClassification). Set",
    "mesh": "sequence_parallel_size is 4, but 2 ranks share each sequence by the mpu or mesh_param",
    "data": "data_parallel_size 3 is not the number of ranks that get different batches, 1",
    "ranks": "sequence_parallel_size 3 does not divide the number of ranks, 4",
}


def test_models_and_configurations_that_do_not_fit_are_refused_on_every_rank(pool4: RankPool) -> None:
    for said in pool4.run(_refused_at_start):
        wrong = [(text, said[fault]) for fault, text in AT_START.items() if text not in said[fault]]
        assert not wrong and all("ValueError" in text for text in said.values()), wrong


def _bad_batches() -> dict[str, str]:
    """What forwards say of batches; the engine trains after each."""
    rank, said = dist.get_rank(), {}
    with modules_replaced({"transformers": stand_in}):
        engine = start(decoder(), config_of(4, 1))
        for fault in BATCHES:
            batch = batch_of("odd" if fault == "shape" and rank == 1 else "plain", 0, rank * (fault == "different"))
            if fault == "labels" and rank == 1:
                del batch["labels"]
            if fault == "positions":
                batch["shift_labels"] = batch.pop("labels")
            said[fault] = outcome(partial(engine, **batch))
            engine.backward(engine(**batch_of("plain", 0, 0))["loss"])
            engine.step()
        engine.destroy()
    return said


BATCHES = {
    "different": "the ranks of one sequence got different batches",
    "shape": "the ranks of one sequence got different batches ([rows, tokens] of rank 0: [2, 16], rank 1: [2, 13]",
    "labels": "the batch has no tensor 'labels'",
    "positions": "a part of a sequence needs its position ids",
}


def test_a_bad_batch_gets_a_sentence_on_every_rank_and_training_goes_on(pool4: RankPool) -> None:
    for said in pool4.run(_bad_batches):
        wrong = [(text, said[fault]) for fault, text in BATCHES.items() if text not in said[fault]]
        assert not wrong and all("UsageError" in text for text in said.values()), wrong


def _dies() -> None:
    """The second rank ends between two exchanges."""
    with modules_replaced({"transformers": stand_in}):
        engine = start(decoder(), config_of(2, 3))
        if dist.get_rank() == 1:
            engine.module.layers[1].register_forward_pre_hook(lambda *_: os._exit(3))
        outcome(partial(engine, **batch_of("plain", 0, 0)))
        engine.destroy()


def test_a_rank_that_dies_between_exchanges_ends_the_waits_of_the_others() -> None:
    with PatientPool(2) as pool, pytest.raises(RankFailure) as caught:
        pool.run(_dies, time_limit=60)
    text = str(caught.value)
    assert "rank 0: finished" in text and "rank 1: died" in text, text


KINDS, MODELS = ("plain", "packed", "padded", "padded left", "odd"), ({}, GROUPED, UNEVEN, {"window": 5})


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("sp", [2, 4])
def test_training_equals_one_process_everywhere(pool4: RankPool, sp: int, stage: int, kind: str) -> None:
    for model in MODELS:
        for errors in pool4.run(parity, sp, stage, kind, model):
            assert max(errors.values()) <= 2e-6, (model, errors)
