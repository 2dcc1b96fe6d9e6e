"""Balanced batches: an update is that of its samples one by one, however many ranks share which of them."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.sequence.balance import CostModel
from deepspeed.sequence.balanced_loader import BalancedLoader
from deepspeed.sequence.degrees import DegreeGroups
from deepspeed.tools.verify.grads import scaled_error
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.harness.pool import RankPool
from tests.harness.training import ADAMW, make_config, outcome, start

pytestmark = pytest.mark.timeout(120)
WIDTH, HEADS, VOCABULARY, LONGEST, MICROS = 16, 4, 32, 40, 2
COST = CostModel(0.01, 1.0, exchange_bytes=8.0, node_bandwidth=1.0)  # sharing costs, so that few sequences are shared


class Attends(nn.Module):
    """One block of a language model. ``groups``: ranks may share its sequences; else it sees one sequence alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.qkv, self.out, self.head = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.groups: DegreeGroups | None = None

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, shift_labels: Any = None) -> Tensor:
        x = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if self.groups is None:
            attended = _causal(q, k, v, 1)
        else:
            attended = self.groups.layout(position_ids).attend(q, k, v, _causal)
        hidden = x + self.out(attended.flatten(2))
        targets = F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def _causal(q: Tensor, k: Tensor, v: Tensor, _groups: int) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def samples() -> list[dict[str, Tensor]]:
    """Mostly short, a few long; every fourth with labels of its second half only."""
    draw = torch.Generator().manual_seed(2)
    sizes = [3, 5, 38, 4, 7, 2, 9, 4, 40, 6, 3, 5, 8, 4, 11, 3, 25, 6, 2, 3]
    found = [{"input_ids": torch.randint(VOCABULARY, (size,), generator=draw)} for size in sizes]
    for sample in found[::4]:
        sample["labels"] = sample["input_ids"].clone()
        sample["labels"][: len(sample["labels"]) // 2] = -100
    return found


def loader_of(model: nn.Module, max_degree: int, **changes: Any) -> BalancedLoader:
    groups = DegreeGroups(max_degree, model)
    model.groups = groups  # type: ignore[assignment]
    room = 64 if max_degree == 1 else 24
    how = {"batch_tokens": 100, "micro_batches": MICROS, "cost": COST, "seed": None, "groups": groups, **changes}
    return BalancedLoader(samples(), room, **how)


def plain_update(model: nn.Module, indices: range) -> None:
    """Gradients of the mean loss over all labels of the samples, one sample after the other."""
    data = samples()
    counts = [int(data[i].get("labels", data[i]["input_ids"])[1:].ne(-100).sum()) for i in indices]
    for index, count in zip(indices, counts, strict=True):
        ids = data[index]["input_ids"][None]
        labels = data[index].get("labels", ids)
        positions = torch.arange(ids.shape[1])[None]
        if count:
            (model(ids, positions, labels.view_as(ids)) * (count / sum(counts))).backward()


def run_parity(stage: int, max_degree: int) -> tuple[float, list[int]]:
    """The largest error of gradients and parameters over an epoch and the next update; degrees of this rank."""
    model, plain = Attends(), Attends()
    kind = "next_tokens" if max_degree == 1 else "tokens"
    engine = start(model, make_config(stage, gradient_accumulation_steps=MICROS, normalize=kind))
    loader = loader_of(model, max_degree)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW["params"])  # type: ignore[arg-type]
    worst, degrees, begin = 0.0, [], 0
    for count, batch in enumerate(itertools.chain(loader, itertools.islice(loader, MICROS)), 1):
        assert model.groups is not None
        degrees.append(model.groups.current.size)
        engine.backward(engine(**batch))
        if count % MICROS == 0:
            end = loader.state_dict()["samples"]
            optimizer.zero_grad()
            plain_update(plain, range(begin % len(samples()), end))
            grads = [safe_get_full_grad(p) for p in engine.module.parameters()]
            worst = max(scaled_error(g, p.grad) for g, p in zip(grads, plain.parameters(), strict=True))
            optimizer.step()
            begin = end
        engine.step()
    values = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    worst = max(worst, *(scaled_error(v, p.detach()) for v, p in zip(values, plain.parameters(), strict=True)))
    engine.destroy()
    return worst, degrees


@pytest.mark.parametrize(("stage", "max_degree"), [(1, 1), (3, 1), (1, 4), (3, 4), (2, 2)])
def test_an_update_is_that_of_its_samples_one_by_one(pool4: RankPool, stage: int, max_degree: int) -> None:
    ranks = pool4.run(run_parity, stage, max_degree)
    assert max(error for error, _ in ranks) <= 1e-6
    together = [len(set(degrees)) for degrees in zip(*(degrees for _, degrees in ranks), strict=True)]
    assert max(together) == (1 if max_degree == 1 else 2), ranks  # groups of two degrees in one micro-batch


def test_two_ranks_share_what_fits_neither(pool2: RankPool) -> None:
    for error, degrees in pool2.run(run_parity, 1, 2):
        assert error <= 1e-6 and 2 in degrees


def run_refused() -> list[str]:
    model = Attends()

    def first(**changes: Any) -> None:
        next(iter(loader_of(model, 2, **changes)))

    long = [2] * 20 if dist.get_rank() else [3] * 20
    return [outcome(lambda: first(lengths=long)), outcome(lambda: first(batch_tokens=80 + dist.get_rank()))]


def test_ranks_that_would_deal_differently_are_told(pool2: RankPool) -> None:
    for lengths, settings in pool2.run(run_refused):
        assert "DeepSpeedConfigError" in lengths and "lengths is" in lengths and "on rank 1" in lengths
        assert "DeepSpeedConfigError" in settings and "batch_tokens=81" in settings
