"""Data loaders of the engine: a distributed and an endless one, both with a position that can be saved."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed.accelerator.device import get_accelerator
from deepspeed.client.data_position import Order, Position, ResumableSampler, drop_batches, is_stateful, refuse_drawn
from deepspeed.comm import get_rank, get_world_size, is_initialized
from deepspeed.errors import CheckpointError, DeepSpeedConfigError

_END = object()


class RepeatingLoader:
    """Endless iterator over ``loader``; it starts again, with the next epoch's shuffle, when the loader is exhausted.

    Its position is that of ``loader`` where that one keeps a position. Any other loader must give the same batches
    again: the batches of the running round are read once more and dropped.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader: Any = loader
        self._round = self._batches = 0  # those handed out of the running round
        self._skip = 0  # of them, still to be read past
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __len__(self) -> int:
        """Return the number of batches of one round."""
        return len(self.loader)

    def __next__(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._begin()
            batch = next(self._iterator, _END)
            if batch is not _END:
                self._batches += 1
                return batch
            self._round, self._batches, self._iterator = self._round + 1, 0, None
        raise DeepSpeedConfigError(
            "RepeatingLoader: the loader has no batch at all; give it data or set drop_last to false."
        )

    def _begin(self) -> Iterator[Any]:
        # our own loader advances its sampler itself; a plain DataLoader would repeat one shuffle for ever
        sampler = None if isinstance(self.loader, DeepSpeedDataLoader) else getattr(self.loader, "sampler", None)
        if self._round and isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self._round)
        batches = iter(self.loader)
        drop_batches(batches, self._skip)
        self._skip = 0
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch: the loader's own, or round and batches, in plain values."""
        if isinstance(self.loader, DeepSpeedDataLoader):
            return self.loader.state_dict()
        inner = self.loader.state_dict() if is_stateful(self.loader) else None
        return {"round": self._round, "batches": self._batches, "world_size": _ranks(), "loader": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at ``state``, also in the middle of an iteration; CheckpointError where that cannot be exact."""
        if isinstance(self.loader, DeepSpeedDataLoader):
            self.loader.load_state_dict(state)
            return
        if not {"round", "batches", "world_size", "loader"} <= set(state):
            raise CheckpointError(
                "This is no position of a RepeatingLoader over a plain loader; wrap the loader that saved it."
            )
        stateful = is_stateful(self.loader) and state["loader"] is not None
        if stateful:
            self.loader.load_state_dict(state["loader"])
        elif state["batches"]:
            refuse_drawn(getattr(self.loader, "sampler", None))
            refuse_drawn(getattr(getattr(self.loader, "batch_sampler", None), "sampler", None))
            if state["world_size"] != _ranks():
                raise CheckpointError(
                    f"The data position was saved on {state['world_size']} ranks and here are {_ranks()}; a plain "
                    "loader can only be continued on as many. Pass training_data to deepspeed.initialize for a loader "
                    "that any number of ranks can continue."
                )
        self._round, self._batches, self._iterator = state["round"], state["batches"], None
        self._skip = 0 if stateful else self._batches


class DeepSpeedDataLoader:
    """Batches of ``batch_size`` samples for this data-parallel rank.

    Map-style datasets get a shuffling ``DistributedSampler`` over ``data_parallel_world_size`` ranks
    (``ResumableSampler``, whose text says what padding does), unless ``data_sampler`` is given; iterable datasets must
    split themselves. Every pass is a new epoch with a new shuffle; it begins at its first batch. ``tput_timer`` (see
    ``monitor.timers.ThroughputTimer``) starts with each batch. ``deepspeed_dataloader_config`` is accepted for its
    curriculum keys, which this release does not read.

    The position (``state_dict``) counts batches handed out, not those that workers fetched ahead; a batch counts at
    once. With the default sampler it can be loaded on another number of ranks and with another batch size: the rest of
    the epoch then holds every remaining sample once. A sampler or iterable dataset of the user's is restored by its own
    ``state_dict`` and ``load_state_dict``; without them it must give the same order again, and is read past what was
    handed out, on as many ranks. Passes leave the global random numbers alone. Numbers drawn inside worker processes
    are not replayed: workers of a continued epoch have seeds of their own.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        pin_memory: bool = False,
        local_rank: int | None = None,
        tput_timer: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler[int] | Iterable[int] | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: dict[str, Any] | None = None,
    ) -> None:
        if batch_size < 1:
            raise DeepSpeedConfigError(f"DeepSpeedDataLoader: batch_size is {batch_size}; it must be at least 1.")
        self.dataset, self.batch_size, self.tput_timer, self.collate_fn = dataset, batch_size, tput_timer, collate_fn
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        self.deepspeed_dataloader_config = deepspeed_dataloader_config or {}
        # Two processes an accelerator were the original default; forked workers and device contexts do not mix.
        workers = num_local_io_workers or 0
        world_size = _ranks() if data_parallel_world_size is None else data_parallel_world_size
        rank = (get_rank() if is_initialized() else 0) if data_parallel_rank is None else data_parallel_rank
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = ResumableSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
        self.sampler: Any = data_sampler  # None for an iterable dataset
        self.data_sampler, self._world_size, self._rank = data_sampler, world_size, rank
        self._order = Order(data_sampler, dataset, workers=workers, world_size=world_size, batch_size=batch_size)
        self._seed = torch.initial_seed()
        # of its own, so that beginning a pass (anew, after loading) never draws from the global generator
        self._generator = torch.Generator()
        self._next, self._loads = Position(), 0
        self._running: Position | None = None
        # A user's state between two epochs may mean "nothing left": an empty first pass is then made again.
        self._maybe_spent = False
        self._stream: Iterator[Any] | None = None
        self.dataloader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler if data_sampler is None or self._order.shared else self._order,
            num_workers=workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory and get_accelerator().device_name() != "cpu",
            drop_last=dataloader_drop_last,
            generator=self._generator,
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which decides the shuffle. A loaded position in that epoch stays."""
        if epoch != self._next.epoch:
            self._next = Position(epoch)

    def __len__(self) -> int:
        """Return the batches of a whole epoch on this rank, even when the next pass is the rest of one."""
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the next epoch, or over the rest of the one whose position was loaded."""
        position, loads, batches = Position(), -1, iter(())
        while True:
            if self.tput_timer is not None:
                self.tput_timer.start()
            if loads != self._loads:  # a position loaded meanwhile holds for passes that already run
                loads, batches = self._loads, iter(())  # first end the old workers
                position, batches = self._begin()
            batch = next(batches, _END)
            spent, self._maybe_spent = self._maybe_spent and self._running is position, False
            if batch is not _END:
                self._order.handed_out(position)
                yield batch
            elif spent:
                batches = self._fetch()
            else:
                self._running = None if self._running is position else self._running
                return

    def _begin(self) -> tuple[Position, Iterator[Any]]:
        self._running = position = self._next
        self._next = Position(position.epoch + 1)
        # workers have seeds of their own for each epoch, rank and place where the pass begins
        text = f"{self._seed} {position.epoch} {position.samples} {self._rank}"
        # 32 bits, since torch's CPU generator is seeded by no more
        digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
        self._generator.manual_seed(int.from_bytes(digest, "little"))
        drop = self._order.begin(position)
        batches = self._fetch()
        drop_batches(batches, drop)
        return position, batches

    def _fetch(self) -> Iterator[Any]:
        # torch draws the workers' seed into a tensor on the default device, which must be the generator's
        with contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            return iter(self.dataloader)

    def __next__(self) -> Any:
        """Return the next batch of one running epoch, for clients that call ``next`` on the loader itself."""
        self._stream = self._stream or iter(self)
        try:
            return next(self._stream)
        except StopIteration:
            self._stream = None
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out by the pass begun last, in plain values.

        ``epoch`` and ``samples`` (handed out of it by all ranks together) are the same on every rank, and so is all
        else, except ``inner``, the state of a sampler or dataset of the user's. After the last batch but before the
        pass has ended the position is the end of that epoch: the pass to come is empty.
        """
        position = self._running or self._next
        return {
            "epoch": position.epoch,
            "samples": position.samples,
            "seed": self._seed,
            "world_size": self._world_size,
            "batch_size": self.batch_size,
            "order": self._order.facts(),
            "inner": self._order.state(running=self._running is not None),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at ``state``: the next pass, or one that runs now, is the rest of that epoch.

        With the default sampler any rank's state serves every rank of any number. Raises CheckpointError, and changes
        nothing, when the rest cannot be exact: another dataset, sampler or layout of data that the user splits.
        """
        self._order.check(state)
        self._order.load(state)
        self._seed = state["seed"]
        self._next, self._running = Position(state["epoch"], state["samples"]), None
        self._maybe_spent = state["inner"] is not None and not state["samples"]
        self._loads += 1


def _ranks() -> int:
    return get_world_size() if is_initialized() else 1
