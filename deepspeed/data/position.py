"""Where a data loader stands, and what it takes to go on there, perhaps with another number of ranks.

A position is an epoch and the number of its samples that all ranks together have handed out. What can be done with it
depends on who decides the order of the samples; there is one class for each: our sampler (``SharedOrder``), a sampler
of the user's (``SamplerOrder``), or an iterable dataset itself (``StreamOrder``).
"""

import contextlib
import hashlib
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed.data.sampler import ResumableSampler, WatchedSampler, is_stateful
from deepspeed.errors import CheckpointError
from deepspeed.observe.log import log_dist

_DRAWN_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_HINT = "Give it state_dict and load_state_dict, or use the loader's own sampler."


@dataclass
class Position:
    """``samples`` of epoch ``epoch`` were handed out by all ranks together."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Share:
    """Which part of every step this rank takes: ``batch_size`` samples on each of ``world_size`` ranks."""

    world_size: int
    rank: int
    batch_size: int

    @property
    def step(self) -> int:
        """Samples of one batch on all ranks together."""
        return self.world_size * self.batch_size


class SharedOrder:
    """Our sampler: the handed-out samples are a prefix of an order that knows no ranks, so any number of ranks can take
    the rest.
    """

    def __init__(self, sampler: ResumableSampler, share: Share) -> None:
        self.sampler = sampler
        self.share = share

    def facts(self) -> dict[str, Any]:
        """What must be the same where the position is loaded."""
        length = len(self.sampler.dataset)  # type: ignore[arg-type]
        return {"kind": "shared", "samples": length, "shuffle": self.sampler.shuffle, "seed": self.sampler.seed}

    def begin(self, position: Position) -> int:
        """Prepare the pass that starts at ``position``; the number of batches to drop from it."""
        self.sampler.set_epoch(position.epoch)
        self.sampler.start = position.samples
        return 0

    def handed_out(self, position: Position) -> None:
        """Count one more batch on every rank. The last one may be short or padded."""
        position.samples = min(position.samples + self.share.step, len(self.sampler.dataset))  # type: ignore[arg-type]

    def state(self, *, running: bool) -> Any:
        """What the sampler or dataset says of itself; here nothing."""
        return None

    def load(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""

    def check(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError when ``state`` cannot be continued exactly."""


class SamplerOrder:
    """A sampler of the user's: restored by its own state; without one its first indices are left out again on as many
    ranks.
    """

    def __init__(self, sampler: WatchedSampler, share: Share, length: int | None) -> None:
        self.watched = sampler
        self.share = share
        self.length = length
        self._last: Any = None
        self._loaded: Any = None  # until the pass begins; a sampler need not tell what it was told

    def facts(self) -> dict[str, Any]:
        """What must be the same where the position is loaded."""
        return {"kind": "sampler", "samples": self.length}

    def begin(self, position: Position) -> int:
        """Prepare the pass that starts at ``position``; the number of batches to drop from it."""
        sampler: Any = self.watched.sampler
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(position.epoch)
        self.watched.start = 0 if is_stateful(sampler) else position.samples // self.share.world_size
        self.watched.states = deque()
        self._last = self.state(running=False)
        self._loaded = None
        return 0

    def handed_out(self, position: Position) -> None:
        """Count one more batch on every rank; a short last one counts as whole, since nothing comes after it."""
        position.samples += self.share.step
        if self.watched.states:
            self._last = self.watched.states.popleft()

    def state(self, *, running: bool) -> Any:
        """The sampler's state after the last batch handed out, not after the last one that a worker asked for."""
        sampler: Any = self.watched.sampler
        if not is_stateful(sampler):
            return None
        if running:
            return self._last
        return sampler.state_dict() if self._loaded is None else self._loaded

    def load(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        sampler: Any = self.watched.sampler
        self._loaded = state["inner"] if is_stateful(sampler) else None
        if self._loaded is not None:
            sampler.load_state_dict(self._loaded)
        elif state["samples"]:
            log_dist(
                f"The data position leaves out the first indices of {_name(sampler)}: its order must be that "
                "of the run that saved."
            )

    def check(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError when ``state`` cannot be continued exactly."""
        sampler = self.watched.sampler
        refuse_drawn(sampler)
        if is_stateful(sampler) and state["inner"] is None:
            raise CheckpointError(
                f"The data position holds no state for {_name(sampler)}; it was saved with a sampler that has none."
            )
        _same_ranks(state, self.share, sampler)


class StreamOrder:
    """An iterable dataset: restored by its own state; without one its first batches are read again and dropped, in the
    same layout.
    """

    def __init__(self, dataset: Any, share: Share, workers: int) -> None:
        self.dataset = dataset
        self.share = share
        self.workers = workers
        self._loaded: Any = None

    def facts(self) -> dict[str, Any]:
        """What must be the same where the position is loaded."""
        return {"kind": "stream", "workers": self.workers}

    @property
    def _keeps_state(self) -> bool:
        # a worker process iterates over its own copy, whose state is out of reach
        return self.workers == 0 and is_stateful(self.dataset)

    def begin(self, position: Position) -> int:
        """Prepare the pass that starts at ``position``; the number of batches to drop from it."""
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(position.epoch)
        loaded, self._loaded = self._loaded, None
        return 0 if loaded is not None else position.samples // self.share.step

    def handed_out(self, position: Position) -> None:
        """Count one more batch on every rank."""
        position.samples += self.share.step

    def state(self, *, running: bool) -> Any:
        """The dataset's state; nothing is fetched ahead where it is asked."""
        if not self._keeps_state:
            return None
        return self.dataset.state_dict() if self._loaded is None else self._loaded

    def load(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        self._loaded = state["inner"] if self._keeps_state else None
        if self._loaded is not None:
            self.dataset.load_state_dict(self._loaded)

    def check(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError when ``state`` cannot be continued exactly."""
        _same_ranks(state, self.share, self.dataset)
        if state["batch_size"] != self.share.batch_size and not (self._keeps_state and state["inner"] is not None):
            raise CheckpointError(
                f"The data position counts batches of {state['batch_size']} samples of an iterable dataset; "
                "this loader has batches of "
                f"{self.share.batch_size}. Load it with the same batch size, or give {_name(self.dataset)} "
                "state_dict and load_state_dict."
            )


Order = SharedOrder | SamplerOrder | StreamOrder


def check_position(state: dict[str, Any], order: Order) -> None:
    """Raise CheckpointError, before anything was changed, when ``state`` cannot be continued by a loader with
    ``order``.

    At the beginning of an epoch nothing was handed out, and every loader can begin there.
    """
    missing = {"epoch", "samples", "seed", "world_size", "batch_size", "order", "inner"} - set(state)
    if missing:
        raise CheckpointError(
            f"This is no data position of DeepSpeedDataLoader: it lacks {', '.join(sorted(missing))}."
        )
    if not state["samples"]:
        return
    saved, here = state["order"], order.facts()
    names = [name for name in sorted({*saved, *here}) if saved.get(name) != here.get(name)]
    if names:
        told = ", ".join(f"{name} {saved.get(name)!r} (here {here.get(name)!r})" for name in names)
        raise CheckpointError(
            f"The data position is that of other data: saved after {state['samples']} samples of epoch "
            f"{state['epoch']} with {told}. "
            "Load it with the same dataset and sampler, or start its epoch anew."
        )
    order.check(state)


def refuse_drawn(sampler: Any) -> None:
    """Raise CheckpointError for a sampler of torch's whose order is drawn anew from random numbers, and so cannot be
    replayed.
    """
    if isinstance(sampler, _DRAWN_SAMPLERS) and not is_stateful(sampler):
        raise CheckpointError(
            f"The data position cannot be restored: {_name(sampler)} draws a new order each time. {_HINT}"
        )


def _same_ranks(state: dict[str, Any], share: Share, source: Any) -> None:
    if state["world_size"] == share.world_size or (is_stateful(source) and getattr(source, "resizable", False)):
        return
    raise CheckpointError(
        f"The data position was saved on {state['world_size']} data-parallel ranks; here are "
        f"{share.world_size}, and only {_name(source)} "
        f"knows how it splits the data. Resume on {state['world_size']} ranks, use the loader's own sampler, "
        "or, if the state_dict of "
        "rank 0 is right for any number of ranks, say so by an attribute resizable = True."
    )


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def worker_seed(seed: int, position: Position, rank: int) -> int:
    """Seed of the worker processes of one pass: its own for each epoch, rank and place where the pass begins."""
    text = f"{seed} {position.epoch} {position.samples} {rank}"
    # 32 bits, since torch's CPU generator is seeded by no more
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def drop_batches(batches: Iterator[Any], count: int) -> None:
    """Read ``count`` batches and forget them, leaving the random numbers of this process as they were."""
    if not count:
        return
    with kept_random_numbers():
        for _ in range(count):
            if next(batches, StopIteration) is StopIteration:
                return


@contextlib.contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Restores the host random number generators of torch, Python and (where it is loaded) numpy at the end."""
    numpy = sys.modules.get("numpy")
    theirs = numpy.random.get_state() if numpy is not None else None
    ours, python = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(ours)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(theirs)
