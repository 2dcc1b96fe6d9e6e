"""Where a data loader stands, and what it takes to go on there, perhaps with another number of ranks."""

import copy
import random
from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed.errors import CheckpointError
from deepspeed.monitor.log import log_dist

_KEYS = {"epoch", "samples", "seed", "world_size", "batch_size", "order", "inner"}


@dataclass
class Position:
    """Position in the data: ``samples`` of epoch ``epoch`` were handed out by all ranks together."""

    epoch: int = 0
    samples: int = 0


class ResumableSampler(DistributedSampler[Any]):
    """torch's ``DistributedSampler`` that can leave out the first ``start`` samples of an epoch.

    The order of an epoch depends on ``seed``, the epoch and the length of the dataset only, not on the number of ranks,
    and the ranks take turns in it. So what all ranks together have handed out after equally many batches is a prefix of
    the order, and any number of ranks can share the rest. With ``start`` 0 every rank gets what torch's sampler gives.

    Padding: every rank gets equally many indices. Where the (rest of the) epoch does not divide by ``num_replicas``,
    the last round is filled with up to ``num_replicas - 1`` samples from the beginning of the order, as torch does;
    with ``drop_last`` the uneven samples are left out instead. ``len`` is that of a whole epoch, whatever ``start`` is.
    """

    start: int = 0

    def __iter__(self) -> Iterator[int]:
        length, ranks = len(self.dataset), self.num_replicas  # type: ignore[arg-type]
        order = torch.arange(length, device="cpu")
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(length, generator=generator, device="cpu")
        rest = order[self.start :]
        if self.drop_last:
            rest = rest[: len(rest) // ranks * ranks]
        elif missing := -len(rest) % ranks:
            rest = torch.cat([rest, order.repeat(-(-missing // length))[:missing]])
        return iter(rest[self.rank :: ranks].tolist())


class Order(Sampler[int]):
    """Order of the samples: which source decides it, and how a pass begins in the middle of it.

    Of our sampler any number of ranks can take the rest. A sampler or iterable dataset of the user's is restored by its
    own state; without one it is read past the samples handed out. The ``DataLoader`` sees the user's sampler through
    this class: workers fetch ahead, so the state is noted after each batch that is drawn.
    """

    def __init__(self, sampler: Any, dataset: Any, *, workers: int, world_size: int, batch_size: int) -> None:
        self.source, self.world_size, self.batch_size = dataset if sampler is None else sampler, world_size, batch_size
        self.shared, self._sampler = isinstance(sampler, ResumableSampler), sampler is not None
        # samples of one batch on all ranks together
        self.step = (sampler.num_replicas if isinstance(sampler, ResumableSampler) else world_size) * batch_size
        self._facts: dict[str, Any] = {"kind": "stream", "workers": workers}
        if self._sampler:
            self._facts = {"kind": "sampler", "samples": len(dataset) if isinstance(dataset, Sized) else None}
        # a worker process iterates over its own copy of a dataset, whose state is out of reach
        self._stateful = is_stateful(self.source) and not self.shared and (self._sampler or not workers)
        self._skip = 0  # indices of a sampler that are left out
        self._drawn: deque[Any] = deque()  # states after batches that were not yet handed out, oldest first
        self._last: Any = None  # state after the last batch handed out
        self._loaded: Any = None  # until the pass begins; a sampler need not tell what it was told

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[int]:
        drawn = self._drawn = deque()
        for count, index in enumerate(islice(self.source, self._skip, None), 1):
            if self._stateful and count % self.batch_size == 0:
                drawn.append(copy.deepcopy(self.source.state_dict()))
            yield index
        if self._stateful:
            drawn.append(copy.deepcopy(self.source.state_dict()))

    def facts(self) -> dict[str, Any]:
        """Return the facts that must be equal where the position is loaded."""
        if not self.shared:
            return self._facts
        sampler = self.source
        return {"kind": "shared", "samples": len(sampler.dataset), "shuffle": sampler.shuffle, "seed": sampler.seed}

    def begin(self, position: Position) -> int:
        """Prepare the pass that starts at ``position``; return the number of batches to drop from it."""
        if (isinstance(self.source, DistributedSampler) or not self._sampler) and hasattr(self.source, "set_epoch"):
            self.source.set_epoch(position.epoch)
        if self.shared:
            self.source.start = position.samples
            return 0
        self._last, self._loaded = self.state(running=False), None
        self._skip = position.samples // self.world_size if self._sampler and not self._stateful else 0
        return 0 if self._sampler or self._stateful else position.samples // self.step

    def handed_out(self, position: Position) -> None:
        """Count one more batch on every rank; the last one may be short or padded, and nothing comes after it."""
        position.samples += self.step
        if self.shared:
            position.samples = min(position.samples, len(self.source.dataset))
        if self._drawn:
            self._last = self._drawn.popleft()

    def state(self, *, running: bool) -> Any:
        """Return the user's state after the last batch; a dataset is asked directly, as nothing is fetched ahead."""
        if self._loaded is not None or not self._stateful:
            return self._loaded
        return self._last if running and self._sampler else self.source.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``."""
        self._loaded = state["inner"] if self._stateful else None
        if self._loaded is not None:
            self.source.load_state_dict(self._loaded)
        elif state["samples"] and not self.shared:
            log_dist(f"The data position reads past the first samples of {_name(self.source)}: keep its order the same")

    def check(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError, before anything was changed, when ``state`` cannot be continued exactly.

        At the beginning of an epoch nothing was handed out, and every loader can begin there.
        """
        if missing := _KEYS - set(state):
            raise CheckpointError(
                f"This is no data position of DeepSpeedDataLoader: it lacks {', '.join(sorted(missing))}."
            )
        if not state["samples"]:
            return
        saved, ours, name = state["order"], self.facts(), _name(self.source)
        if names := [key for key in sorted({*saved, *ours}) if saved.get(key) != ours.get(key)]:
            differences = ", ".join(f"{key} {saved.get(key)!r} (here {ours.get(key)!r})" for key in names)
            raise CheckpointError(
                f"The data position is that of other data: saved after {state['samples']} samples of epoch "
                f"{state['epoch']} with {differences}. Load it with the same dataset and sampler, or start its epoch "
                "anew."
            )
        if self.shared:
            return
        refuse_drawn(self.source)
        if self._stateful and state["inner"] is None:
            raise CheckpointError(f"The data position holds no state for {name}; it was saved with one that has none.")
        if state["world_size"] != self.world_size and not (self._stateful and getattr(self.source, "resizable", False)):
            raise CheckpointError(
                f"The data position was saved on {state['world_size']} data-parallel ranks; here are "
                f"{self.world_size}, and only {name} knows how it splits the data. Resume on {state['world_size']} "
                "ranks, use the loader's own sampler, or, if the state_dict of rank 0 is right for any number of "
                "ranks, say so by an attribute resizable = True."
            )
        if not self._sampler and not self._stateful and state["batch_size"] != self.batch_size:
            raise CheckpointError(
                f"The data position counts batches of {state['batch_size']} samples of an iterable dataset, this "
                f"loader {self.batch_size}. Load it with the same batch size, or give {name} state_dict and "
                "load_state_dict."
            )


def refuse_drawn(sampler: Any) -> None:
    """Raise CheckpointError for a sampler of torch's that draws a new order each time, which cannot be replayed."""
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler) and not is_stateful(sampler):
        raise CheckpointError(
            f"The data position cannot be restored: {_name(sampler)} draws a new order each time. Give it state_dict "
            "and load_state_dict, or use the loader's own sampler."
        )


def is_stateful(thing: Any) -> bool:
    """Tell whether ``thing`` keeps its own position: it has both ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def drop_batches(batches: Iterator[Any], count: int) -> None:
    """Read and drop ``count`` batches; the random states of torch (host), Python and numpy stay."""
    if not count:
        return
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            deque(islice(batches, count), maxlen=0)
    finally:
        random.setstate(python)
        np.random.set_state(array)
