"""Sequences of mixed lengths: plans are equal everywhere, keep the limits, come near the bound, and lose no token."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.sequence.lengths.balanced_loader import Dealer, Update
from deepspeed.sequence.lengths.dealing import CostModel, Plan, draw_lengths, plan_batch

COST = CostModel.of_transformer(parameters=8e9, layers=32, hidden=4096, kv_hidden=1024)
ROOM = 65536
CASES = [("wikipedia", 64), ("lmsys_chat", 64), ("byted", 64), ("byted", 256), ("byted", 1024)]


def drawn(name: str, ranks: int, seed: int) -> list[int]:
    """Lengths up to 256K of one update with 64K tokens a rank."""
    lengths = draw_lengths(name, 250 * ranks, seed=seed, longest=262_144)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), ranks * ROOM))]


def planned(name: str, ranks: int, seed: int) -> tuple[list[int], Plan]:
    lengths = drawn(name, ranks, seed)
    return lengths, plan_batch(lengths, ranks, ROOM, cost=COST, steps=4)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_plans_keep_the_limits_and_come_near_the_bound(name: str, ranks: int, seed: int) -> None:
    lengths, plan = planned(name, ranks, seed)
    dealt = sorted(place for group in plan.groups for part in group.steps for place in part)
    assert dealt == list(range(len(lengths)))
    first = 0
    for group in plan.groups:
        assert group.first == first and group.first % group.degree == 0 and group.degree.bit_count() == 1
        assert all(sum(lengths[i] for i in part) <= ROOM * group.degree for part in group.steps)
        seconds = sum(float(COST.seconds(np.float64(lengths[i]), group.degree)) for part in group.steps for i in part)
        assert seconds == pytest.approx(group.seconds)
        first += group.degree
    assert first == ranks
    assert plan.bound <= plan.seconds <= 1.05 * plan.bound


def test_no_plan_is_faster_than_the_bound() -> None:
    """All plans of a few sequences on two ranks: alone on one of them, or shared by both."""
    cost = CostModel(1e-3, 1.0, exchange_bytes=0.1, node_bandwidth=1.0)
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 1000, 5).tolist()
        times = [[float(cost.seconds(np.float64(n), degree)) for n in lengths] for degree in (1, 2)]
        splits = [sum(t for i, t in enumerate(times[0]) if mask >> i & 1) for mask in range(32)]
        fastest = min(sum(times[1]), *(max(one, sum(times[0]) - one) for one in splits))
        plan = plan_batch(lengths, 2, 5000, cost=cost)
        assert plan.bound <= fastest * (1 + 1e-9) and fastest <= plan.seconds * (1 + 1e-9)


def test_equal_arguments_give_equal_plans() -> None:
    assert planned("byted", 64, 3) == planned("byted", 64, 3)


def test_what_fits_no_group_is_a_sentence() -> None:
    for lengths, ranks, parts in (
        ([9, 300], 4, "a sequence of 300 tokens does not fit 2 ranks"),
        ([60] * 9, 4, "9 sequences of 540 tokens could not be dealt to 4 ranks x 2 micro-batches"),
        ([3, 0], 4, "of at least 1"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=parts):
            plan_batch(lengths, ranks, 64, cost=COST, max_degree=2, steps=2)


def documents(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Each token of all is another number, from 1 on; of every third document half has no label."""
    lengths = np.random.default_rng(seed).integers(2, 40, count).tolist()
    edges = np.cumsum([1, *lengths]).tolist()
    found = [{"input_ids": list(range(a, b))} for a, b in zip(edges, edges[1:], strict=False)]
    for document in found[::3]:
        ids = document["input_ids"]
        document["labels"] = [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]
    return found


def updates(dealer: Dealer, data: list[dict[str, list[int]]]) -> Iterator[Update]:
    start = 0
    while start < len(data):
        update = dealer.take(range(start, len(data)), lambda index: len(data[index]["input_ids"]))
        start += len(update.indices)
        yield update


@pytest.mark.parametrize(("ranks", "degree", "count"), [(1, 1, 60), (4, 1, 61), (8, 4, 200), (6, 2, 7), (16, 2, 3)])
def test_every_label_is_trained_once_from_the_tokens_before_it(ranks: int, degree: int, count: int) -> None:
    data, steps = documents(count), 2
    dealer = Dealer(ranks, 64, 32 * ranks * steps, steps, degree)
    wanted = sorted(label for sample in data for label in sample.get("labels", sample["input_ids"])[1:] if label >= 0)
    begins = {token: sample["input_ids"][0] for sample in data for token in sample["input_ids"]}
    trained: list[int] = []
    for update in updates(dealer, data):
        for rank in range(ranks):
            for step in range(steps):
                batch = update.micro_batch(data, step, rank)
                assert 0 < batch["input_ids"].numel() <= 64
                ids, positions = batch["input_ids"][0], batch["position_ids"][0]
                labels = batch["labels"][0]
                valid = labels >= 0
                assert torch.equal(labels[valid], ids[valid] + 1)  # the next token of the same document
                places = [(int(i), int(p)) for i, p in zip(ids, positions, strict=True) if i]
                assert all(p == i - begins[i] for i, p in places)
                trained += labels[valid].tolist()
    assert sorted(trained) == wanted


def test_ranks_without_a_sequence_compute_one_token_that_has_no_label() -> None:
    data = documents(1)
    update = Dealer(4, 64, 64).take([0], lambda index: len(data[index]["input_ids"]))
    batches = sorted((update.micro_batch(data, 0, rank) for rank in range(4)), key=lambda b: b["labels"].numel())
    assert [batch["input_ids"].tolist() for batch in batches] == [[[1]]] * 3 + [[data[0]["input_ids"]]]
    assert all(batch["labels"].tolist() == [[-100]] for batch in batches[:3])
