"""Balanced batches: an update is that of its samples one by one, however many ranks share which of them."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.pipe import PipelineModule
from deepspeed.sequence.lengths.balanced_loader import BalancedLoader
from deepspeed.sequence.lengths.dealing import CostModel
from deepspeed.sequence.lengths.degrees import DegreeGroups
from deepspeed.tools.verify.grads import scaled_error
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.dist.test_sequence import TENSOR
from tests.harness import pipes
from tests.harness.faults import modules_replaced
from tests.harness.pool import RankPool
from tests.harness.sequences import WORDS, decoder, stand_in
from tests.harness.training import ADAMW, make_config, outcome, start

pytestmark = pytest.mark.timeout(120)
WIDTH, HEADS, VOCABULARY, LONGEST, MICROS = 16, 4, 32, 40, 2
SGD = {"type": "SGD", "params": {"lr": 0.0}}
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

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if self.groups is None:
            attended = _causal(q, k, v, 1)
        else:
            attended = self.groups.layout(position_ids).attend(q, k, v, _causal)
        hidden = x + self.out(attended.flatten(2))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


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


def started(stage: int, max_degree: int, **changes: Any) -> tuple[Any, BalancedLoader]:
    model = Attends()
    engine = start(model, make_config(stage, gradient_accumulation_steps=MICROS, normalize="tokens"))
    how = {"batch_tokens": 100, "cost": COST, "seed": None, "max_degree": max_degree, **changes}
    loader = BalancedLoader(samples(), engine, 64 if max_degree == 1 else 24, **how)
    model.groups = loader.groups
    return engine, loader


def plain_update(model: nn.Module, indices: range, data: list[dict[str, Tensor]]) -> float:
    """Loss, and gradients, of the mean over all labels of the samples, one sample after the other."""
    total = 0.0
    counts = [int(data[i].get("labels", data[i]["input_ids"])[1:].ne(-100).sum()) for i in indices]
    for index, count in zip(indices, counts, strict=True):
        ids = data[index]["input_ids"][None]
        labels = data[index].get("labels", ids)
        positions = torch.arange(ids.shape[1])[None]
        if count:
            targets = F.pad(labels.view_as(ids)[:, 1:], (0, 1), value=-100)
            loss = model(ids, positions, targets) * (count / sum(counts))
            loss.backward()
            total += float(loss.detach())
    return total


def run_parity(stage: int, max_degree: int) -> tuple[float, list[int]]:
    """The largest error of gradients and parameters over an epoch and the next update; degrees of this rank."""
    plain, (engine, loader) = Attends(), started(stage, max_degree)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW["params"])  # type: ignore[arg-type]
    worst, degrees, begin = 0.0, [], 0
    for count, batch in enumerate(itertools.chain(loader, itertools.islice(loader, MICROS)), 1):
        degrees.append(loader.groups.current.size)
        engine.backward(engine(**batch))
        if count % MICROS == 0:
            end = loader.state_dict()["samples"]
            optimizer.zero_grad()
            plain_update(plain, range(begin % len(samples()), end), samples())
            grads = [safe_get_full_grad(p) for p in engine.module.parameters()]
            worst = max(worst, *(scaled_error(g, p.grad) for g, p in zip(grads, plain.parameters(), strict=True)))
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


def run_unlabelled(folder: Path, stage: int) -> tuple[list[float], list[float], float, int]:
    """Losses by the monitor and by one process, the worst gradient, and micro-batches of this rank without a label."""
    data = [{"input_ids": sample["input_ids"][:8]} for sample in samples() if len(sample["input_ids"]) >= 8]
    for sample in data[::2]:
        sample["labels"] = torch.full_like(sample["input_ids"], -100)
    plain, told, wanted, worst, empty = Attends(), list[float](), list[float](), 0.0, 0
    monitor = {"enabled": True, "output_file": str(folder / f"{dist.get_rank()}.prom")}
    engine = start(Attends(), make_config(stage, normalize="tokens", optimizer=SGD, prometheus=monitor))
    engine.monitor.write_events = lambda events: told.extend(v for n, v, _ in events if n.endswith("train_loss"))
    loader = BalancedLoader(data, engine, 16, batch_tokens=32, cost=COST, seed=None)
    engine.module.groups = loader.groups
    begin = 0
    for batch in loader:
        empty += int(batch["labels"].ne(-100).sum() == 0)
        engine.backward(engine(**batch))
        end = loader.state_dict()["samples"]
        plain.zero_grad()
        wanted.append(plain_update(plain, range(begin, end), data))
        pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
        worst = max(worst, *(scaled_error(safe_get_full_grad(p), q.grad) for p, q in pairs))
        engine.step()
        begin = end
    engine.destroy()
    return told, wanted, worst, empty


@pytest.mark.parametrize("stage", [0, 3])
def test_the_loss_of_an_update_is_that_of_all_its_labels_where_a_rank_has_none(
    pool2: RankPool, tmp_path: Path, stage: int
) -> None:
    ranks = pool2.run(run_unlabelled, tmp_path, stage)
    assert sum(empty for *_, empty in ranks) > 0
    for told, wanted, worst, _ in ranks:
        assert told == pytest.approx(wanted, rel=1e-5) and worst <= 1e-6


def run_tensor_parallel(folder: Path, stage: int, max_degree: int) -> tuple[list[float], list[float], set[int]]:
    """Losses and norms of updates by the monitor, and by one process; degrees of this rank."""
    told, wanted, degrees, begin = list[float](), list[float](), set[int](), 0
    draw = torch.Generator().manual_seed(3)
    sizes = [3, 5, 30, 4, 7, 2, 9, 4, 34, 6, 3, 5]
    data = [{"input_ids": torch.randint(1, WORDS, (size,), generator=draw)} for size in sizes]
    monitor = {"enabled": True, "output_file": str(folder / f"{dist.get_rank()}.prom")}
    with modules_replaced({"transformers": stand_in}):
        ours, plain = decoder(heads=4, keys=2), decoder(heads=4, keys=2)
        rule = {"type": "SGD", "params": {"lr": 0.1}}
        config = make_config(stage, normalize="tokens", optimizer=rule, prometheus=monitor, **TENSOR)
        engine, optimizer = start(ours, config), torch.optim.SGD(plain.parameters(), lr=0.1)
        names = ("train_loss", "grad_norm")
        engine.monitor.write_events = lambda events: told.extend(v for n, v, _ in events if n.endswith(names))
        loader = BalancedLoader(
            data, engine, 24 if max_degree > 1 else 48, batch_tokens=48, max_degree=max_degree, cost=COST, seed=None
        )
        for batch in loader:
            degrees.add(loader.groups.current.size)
            engine.backward(engine(**batch)["loss"])
            engine.step()
            rows = [sample["input_ids"][None] for sample in data[begin : loader.state_dict()["samples"] or None]]
            total, begin = sum(row.shape[1] - 1 for row in rows), begin + len(rows)
            losses = [plain(input_ids=row, labels=row)["loss"] * ((row.shape[1] - 1) / total) for row in rows]
            optimizer.zero_grad()
            sum(losses).backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
            optimizer.step()
            wanted += [float(sum(losses).detach()), float(norm)]
        engine.destroy()
    return told, wanted, degrees


@pytest.mark.parametrize(("stage", "max_degree"), [(1, 2), (3, 1)])
def test_tensor_parallel_ranks_get_the_same_batches(
    pool4: RankPool, tmp_path: Path, stage: int, max_degree: int
) -> None:
    ranks = pool4.run(run_tensor_parallel, tmp_path, stage, max_degree)
    for told, wanted, degrees in ranks:
        assert len(told) >= 4 and told == pytest.approx(wanted, rel=1e-5)
        assert degrees == ({1, 2} if max_degree > 1 else {1})


def run_resumed(folder: Path) -> list[bool]:
    """Whether the batches behind a checkpoint are those that were left: at an update, and in an open window."""
    engine, loader = started(1, 2, seed=5)
    wanted, same = [batch["input_ids"] for batch in itertools.chain(loader, loader)], []
    engine.destroy()
    for stop in (2, 3):
        engine, loader = started(1, 2, seed=5)
        for batch in itertools.islice(itertools.chain(loader, loader), stop):
            engine.backward(engine(**batch))
            engine.step()
        engine.save_checkpoint(folder, tag=f"{stop}")
        engine.destroy()
        engine, loader = started(1, 2, seed=5)
        engine.load_checkpoint(folder, tag=f"{stop}")
        rest = [batch["input_ids"] for batch in itertools.chain(loader, loader)][: len(wanted) - stop]
        engine.destroy()
        same.append(len(rest) == len(wanted) - stop and all(map(torch.equal, rest, wanted[stop:])))
    return same


def test_a_checkpoint_goes_on_with_the_samples_that_are_left(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(run_resumed, tmp_path) == [[True, True]] * 2


def run_labels(state: dict[str, Any] | None) -> tuple[dict[str, Any], int]:
    """Position and labels of this rank behind one update; with ``state``: behind the rest of the epoch."""
    engine, loader = started(0, 2, seed=5)
    if state is not None:
        loader.load_state_dict(state)
    batches = itertools.islice(loader, MICROS) if state is None else loader
    labels = sum(int(batch["labels"].ne(-100).sum()) for batch in batches)
    engine.destroy()
    return loader.state_dict(), labels


def test_other_ranks_train_what_is_left(pool2: RankPool, pool4: RankPool) -> None:
    first = pool2.run(run_labels, None)
    rest = pool4.run(run_labels, first[0][0])
    wanted = sum(int(sample.get("labels", sample["input_ids"])[1:].ne(-100).sum()) for sample in samples())
    assert min(labels for _, labels in (*first, *rest)) > 0
    assert sum(labels for _, labels in (*first, *rest)) == wanted


def run_refused() -> list[str]:
    rank = dist.get_rank()

    def first(**changes: Any) -> None:
        engine, loader = started(0, 2, **changes)
        try:
            next(iter(loader))
        finally:
            engine.destroy()

    def moved(state: dict[str, Any], **changes: Any) -> None:
        engine, loader = started(0, 2, **changes)
        try:
            loader.load_state_dict(state)
        finally:
            engine.destroy()

    engine, loader = started(0, 2)
    next(iter(loader))
    within = loader.state_dict()
    engine.destroy()
    wrong = start(Attends(), make_config(0))
    stages = PipelineModule(pipes.layers(4), num_stages=2, loss_fn=pipes.cross_entropy)
    pipeline = start(stages, make_config(1))
    said = [
        outcome(lambda: first(lengths=[3 - rank] * 20)),
        outcome(lambda: first(batch_tokens=80 + rank)),
        outcome(lambda: first(lengths=[3] * 19)),
        outcome(lambda: moved(within, batch_tokens=77)),
        outcome(lambda: moved(within, seed=6)),
        outcome(lambda: BalancedLoader(samples(), wrong, 64)),
        outcome(lambda: BalancedLoader(samples(), pipeline, 64)),
    ]
    wrong.destroy()
    pipeline.destroy()
    return said


def test_what_would_go_wrong_is_a_sentence_on_every_rank(pool2: RankPool) -> None:
    parts = (
        "on rank 0 and [2, 2, 2, 2] ...",
        "batch_tokens=81",
        "19 lengths for 20 samples",
        "between two updates",
        "seed None (here 6)",
        '"normalize" is "micro_batches"',
        "the stages of a pipeline pass on micro-batches of one length",
    )
    for said in pool2.run(run_refused):
        for text, part in zip(said, parts, strict=True):
            assert part in text, said
