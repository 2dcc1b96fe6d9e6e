"""Data loaders of the engine: a distributed ``DataLoader`` and an endless wrapper."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed.comm import get_rank, get_world_size, is_initialized
from deepspeed.device import get_accelerator
from deepspeed.errors import DeepSpeedConfigError

# The original default of two processes for each accelerator. Here loading stays in this process unless workers are asked
# for: forked workers and device contexts do not mix, and a dataset in memory is slower through them.
_DEFAULT_WORKERS = 0


class RepeatingLoader:
    """Endless iterator over ``loader``; it starts again, with the next epoch's shuffle, when the loader is exhausted."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._epoch = 0
        self._iterator = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __len__(self) -> int:
        """Batches of one round."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._restart()
        try:
            return next(self._iterator)
        except StopIteration:
            raise DeepSpeedConfigError("RepeatingLoader: the loader has no batch at all; give it data or set drop_last to false.") from None

    def _restart(self) -> None:
        self._epoch += 1
        # our own loader advances its sampler itself; a plain DataLoader would repeat one shuffle for ever
        sampler = None if isinstance(self.loader, DeepSpeedDataLoader) else getattr(self.loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self._epoch)
        self._iterator = iter(self.loader)


class DeepSpeedDataLoader:
    """Batches of ``batch_size`` samples for this data-parallel rank.

    Map-style datasets get a shuffling ``DistributedSampler`` over ``data_parallel_world_size`` ranks, unless ``data_sampler``
    is given; iterable datasets must split themselves. Every ``iter`` is a new epoch with a new shuffle.
    ``tput_timer`` (see ``observe.timers.ThroughputTimer``) starts with each batch. ``deepspeed_dataloader_config`` is accepted
    for its curriculum keys, which this release does not read.
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
        self.dataset = dataset
        self.batch_size = batch_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        self.tput_timer = tput_timer
        self.collate_fn = collate_fn
        self.deepspeed_dataloader_config = deepspeed_dataloader_config or {}
        self._epoch = 0
        self._stream: Iterator[Any] | None = None
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = _sampler(dataset, data_parallel_world_size, data_parallel_rank)
        self.data_sampler = data_sampler
        workers = _DEFAULT_WORKERS if num_local_io_workers is None else num_local_io_workers
        self.dataloader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=data_sampler,
            num_workers=workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory and get_accelerator().device_name() != "cpu",
            drop_last=dataloader_drop_last,
        )

    @property
    def sampler(self) -> Any:
        """The sampler in use, None for an iterable dataset."""
        return self.data_sampler

    def set_epoch(self, epoch: int) -> None:
        """Number of the epoch that the next ``iter`` begins; it decides the shuffle."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches of one epoch on this rank."""
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.data_sampler, DistributedSampler):
            self.data_sampler.set_epoch(self._epoch)
        self._epoch += 1
        return self._batches(iter(self.dataloader))

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self.tput_timer is not None:
                self.tput_timer.start()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def __next__(self) -> Any:
        """Next batch of one running epoch, for clients that call ``next`` on the loader itself."""
        if self._stream is None:
            self._stream = iter(self)
        try:
            return next(self._stream)
        except StopIteration:
            self._stream = None
            raise


def _sampler(dataset: Dataset[Any], world_size: int | None, rank: int | None) -> DistributedSampler[Any]:
    if world_size is None:
        world_size = get_world_size() if is_initialized() else 1
    if rank is None:
        rank = get_rank() if is_initialized() else 0
    return DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
