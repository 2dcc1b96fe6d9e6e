"""Samplers that can begin in the middle of an epoch: ours, and any sampler of the user's seen through
``WatchedSampler``.
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler


class ResumableSampler(DistributedSampler[Any]):
    """torch's ``DistributedSampler`` that can leave out the first ``start`` samples of an epoch.

    The order of an epoch depends on ``seed``, the epoch and the length of the dataset only, not on the number of ranks,
    and the ranks take turns in it. So what all ranks together have handed out after equally many batches is a prefix of
    the order, and any number of ranks can share the rest. With ``start`` 0 every rank gets what torch's sampler gives,
    index for index.

    Padding: every rank gets equally many indices. Where the (rest of the) epoch does not divide by ``num_replicas``,
    the last round is filled with up to ``num_replicas - 1`` samples from the beginning of the order, exactly as torch
    does; those are seen twice in the epoch and are the last ones. With ``drop_last`` the uneven samples are left out
    instead. ``len`` is that of a whole epoch, whatever ``start`` is.
    """

    start: int = 0

    def __iter__(self) -> Iterator[int]:
        length, ranks = len(self.dataset), self.num_replicas  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(length, generator=generator, device="cpu")
        else:
            order = torch.arange(length, device="cpu")
        rest = order[self.start :]
        if self.drop_last:
            rest = rest[: len(rest) // ranks * ranks]
        elif len(rest) % ranks:
            missing = ranks - len(rest) % ranks
            rest = torch.cat([rest, order.repeat(-(-missing // length))[:missing]])
        return iter(rest[self.rank :: ranks].tolist())


class WatchedSampler(Sampler[int]):
    """The user's ``sampler`` as the ``DataLoader`` sees it: ``start`` of its indices are left out, and its state is
    noted per batch.

    Workers fetch ahead, so a sampler's own state is ahead of the batches handed out. ``states`` holds its state after
    each batch of ``batch_size`` indices that was drawn and not yet handed out, oldest first (nothing when it has no
    ``state_dict``).
    """

    def __init__(self, sampler: Iterable[int], batch_size: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.start = 0
        self.states: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        states: deque[Any] = deque()
        self.states = states
        count = 0
        for count, index in enumerate(islice(iter(self.sampler), self.start, None), 1):
            if count % self.batch_size == 0:
                self._note(states)
            yield index
        if count % self.batch_size:
            self._note(states)

    def _note(self, states: deque[Any]) -> None:
        if is_stateful(self.sampler):
            states.append(copy.deepcopy(self.sampler.state_dict()))  # type: ignore[attr-defined]


def is_stateful(thing: Any) -> bool:
    """Whether ``thing`` keeps its own position: it has both ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def length_of(thing: Any) -> int | None:
    """``len(thing)``, None where it has none."""
    try:
        return len(thing) if isinstance(thing, Sized) else None
    except (
        TypeError,
        NotImplementedError,
    ):  # torch's DataLoader over a dataset without a length has a __len__ that raises
        return None
