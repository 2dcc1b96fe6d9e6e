"""Balanced batches: sequences of mixed lengths, packed and dealt so that all ranks take about equally long."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.client.data_position import ResumableSampler
from deepspeed.comm.collectives import gather_objects
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.sequence.lengths.dealing import CostModel, DoesNotFit, Plan, plan_batch
from deepspeed.sequence.lengths.degrees import DegreeGroups
from deepspeed.sequence.lengths.packing import pack, part_of_pack, tokens_of

# A model of 7 billion parameters on an H100. Where nothing is exchanged, only the ratio of its two numbers counts.
USUAL_COST = CostModel.of_transformer(parameters=7e9, layers=32, hidden=4096, kv_hidden=1024)


@dataclass(frozen=True)
class Update:
    """One update: samples ``indices`` of the dataset; the plan has their places in ``indices``."""

    indices: tuple[int, ...]
    plan: Plan

    def micro_batch(self, dataset: Any, step: int, rank: int) -> dict[str, torch.Tensor]:
        """Return what ``rank`` trains in micro-batch ``step``: its group's documents packed, or its part of them.

        One token without a label stands for no document, as ranks meet in the forward of each micro-batch.
        """
        group = self.plan.group_of(rank)
        samples = [tokens_of(dataset[self.indices[place]]) for place in group.steps[step]]
        if not samples:
            samples = [{name: value[:1] for name, value in tokens_of(dataset[self.indices[0]]).items()}]
        return part_of_pack(pack(samples), rank - group.first, group.degree)


@dataclass(frozen=True)
class Dealer:
    """Cuts an order of samples into updates, and deals each to the ranks. Equal arguments give equal updates."""

    ranks: int
    tokens_per_rank: int
    batch_tokens: int
    steps: int = 1
    max_degree: int = 1
    cost: CostModel = USUAL_COST

    def take(self, order: Iterable[int], length_of: Callable[[int], int]) -> Update:
        """Take the next update from the front of ``order``: up to ``batch_tokens``, fewer where these do not fit."""
        indices, lengths, total = list[int](), list[int](), 0
        for index in order:
            length = length_of(index)
            total += length
            if indices and total > self.batch_tokens:
                break
            indices.append(index)
            lengths.append(length)
        how: dict[str, Any] = {"cost": self.cost, "max_degree": self.max_degree, "steps": self.steps}
        while True:
            try:
                plan = plan_batch(lengths, self.ranks, self.tokens_per_rank, **how)
                return Update(tuple(indices[: len(lengths)]), plan)
            except DoesNotFit:
                if len(lengths) == 1:
                    raise
                lengths = lengths[: len(lengths) * 7 // 8]


class BalancedLoader:
    """Micro-batches of this rank, on its device, which take about as long as every other's. Of a map-style ``dataset``.

    Samples are dictionaries with ``input_ids`` and perhaps ``labels``, or the ids alone. A micro-batch is one row of
    whole documents with ``position_ids``, and as ``labels`` those of the next token each (``shift_labels`` too for
    models of Transformers). Under ``"normalize": "tokens"`` the update is that of the same samples one by one.

    An update has up to ``batch_tokens`` tokens of all ranks (default: half of what fits, as ranks with short sequences
    need room), in ``gradient_accumulation_steps`` micro-batches of at most ``tokens_per_rank`` tokens a rank. Up to
    ``max_degree`` ranks share a long sequence (see ``DegreeGroups``): train on a micro-batch before the next is taken.
    ``lengths``: of all samples, or a function of the index; without it each rank reads every sample. ``seed`` None
    keeps the dataset's order.

    Every rank must have the same dataset and arguments. The position lies between any two micro-batches; between two
    updates any number of ranks can continue. Checkpoints keep it, unless the engine has another loader.
    """

    def __init__(
        self,
        dataset: Any,
        engine: Any,
        tokens_per_rank: int,
        *,
        batch_tokens: int | None = None,
        lengths: Sequence[int] | Callable[[int], int] | None = None,
        max_degree: int = 1,
        cost: CostModel = USUAL_COST,
        seed: int | None = 0,
    ) -> None:
        ranks, steps = engine.mesh.zero, engine.gradient_accumulation_steps()
        _check(dataset, engine)
        self.dataset, self._seed, self._ranks, self._device = dataset, seed, ranks, engine.device
        self._length = self._length_function(lengths)
        self._sampler = ResumableSampler(dataset, num_replicas=1, rank=0, shuffle=seed is not None, seed=seed or 0)
        total = max(ranks.size * tokens_per_rank * steps // 2, 1) if batch_tokens is None else batch_tokens
        self._dealer = Dealer(ranks.size, tokens_per_rank, total, steps, min(max_degree, ranks.size), cost)
        self.groups = DegreeGroups(max_degree, engine.module, ranks, tp=engine.mesh.tp.size)
        engine._lasting.callback(self.groups.detach)
        if engine.training_dataloader is None:
            engine.training_dataloader = self
        # Samples of the epoch before the running update, and how many of its micro-batches were handed out.
        self._epoch = self._samples = self._step = self._loads = 0

    def _length_function(self, lengths: Sequence[int] | Callable[[int], int] | None) -> Callable[[int], int]:
        if lengths is None:
            return lambda index: len(tokens_of(self.dataset[index])["input_ids"])
        if callable(lengths):
            return lengths
        if len(lengths) != len(self.dataset):
            raise DeepSpeedConfigError(
                f"BalancedLoader: {len(lengths)} lengths for {len(self.dataset)} samples; each sample needs one"
            )
        return lengths.__getitem__

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Iterate over the epoch, or over the rest of it behind a loaded position."""
        self._agree()
        loads, order, update = -1, list[int](), None
        while True:
            if loads != self._loads:  # a position loaded meanwhile holds for passes that already run
                loads, update = self._loads, None
                self._sampler.set_epoch(self._epoch)
                order = list(self._sampler)
            if self._samples >= len(order):
                break
            update = update or self._dealer.take(order[self._samples :], self._length)
            self.groups.use(update.plan.group_of(self._ranks.index).degree)
            parts = update.micro_batch(self.dataset, self._step, self._ranks.index)
            batch = {name: part.to(self._device) for name, part in parts.items()}
            if self.groups.wired:
                batch["shift_labels"] = batch["labels"]
            self._step += 1
            if self._step == self._dealer.steps:
                self._samples, self._step, update = self._samples + len(update.indices), 0, None
            yield batch
        self._epoch, self._samples, self._step = self._epoch + 1, 0, 0

    def _agree(self) -> None:
        """Raise DeepSpeedConfigError on every rank unless all would deal the same updates. Collective."""
        lengths = [self._length(index) for index in list(self._sampler)[:64]]
        facts = {
            "settings": self._dealer,
            "samples": len(self.dataset),
            "lengths": f"{lengths[:4]} ... ({zlib.crc32(repr(lengths).encode())})",
            "position": (self._epoch, self._samples, self._step),
        }
        everyone = gather_objects(facts, self._ranks)
        for rank, theirs in zip(self._ranks.ranks, everyone, strict=True):
            for name, value in theirs.items():
                if value != everyone[0][name]:
                    raise DeepSpeedConfigError(
                        f"BalancedLoader: {name} is {everyone[0][name]} on rank {self._ranks.ranks[0]} and {value} on "
                        f"rank {rank}; give every rank the same dataset, arguments and position"
                    )

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last micro-batch handed out, in plain values, the same on every rank."""
        return {
            "epoch": self._epoch,
            "samples": self._samples,
            "micro_batches": self._step,
            "seed": self._seed,
            "dataset": len(self.dataset),
            "dealt": repr(self._dealer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at ``state``; CheckpointError where the rest would be other samples than what was left."""
        current = self.state_dict()
        if missing := current.keys() - state.keys():
            raise CheckpointError(f"This is no position of a BalancedLoader: it lacks {', '.join(sorted(missing))}.")
        fixed = ["seed", "dataset"] + (["dealt"] if state["micro_batches"] else [])
        if wrong := [name for name in fixed if state[name] != current[name]]:
            what = ", ".join(f"{name} {state[name]} (here {current[name]})" for name in wrong)
            raise CheckpointError(
                f"The data position was saved with {what}: load it with the same. Ranks and arguments may differ where "
                "it lies between two updates."
            )
        self._epoch, self._samples, self._step = state["epoch"], state["samples"], state["micro_batches"]
        self._loads += 1


def _check(dataset: Any, engine: Any) -> None:
    kind, sp = engine._config.normalize, engine.mesh.sp.size
    faults = {
        "the dataset has no sample": not len(dataset),
        "the stages of a pipeline pass on micro-batches of one length, which are not weighed by their tokens; deal "
        "samples of about one length to a PipelineModule by a loader of your own": engine.mesh.pp.size > 1,
        f'micro-batches have unequal numbers of tokens, but "normalize" is "{kind}"; set it to "tokens"': kind
        != "tokens",
        f"sequence_parallel_size is {sp}, for every sequence; leave it out and give max_degree, as each micro-batch "
        "has its own number of ranks": sp > 1,
    }
    for text in (text for text, broken in faults.items() if broken):
        raise DeepSpeedConfigError(f"BalancedLoader: {text}")
