"""A tensor of which every rank of a group keeps one flat part, as pipelines of clients send them."""

from typing import Any

import torch
import torch.distributed as dist


class PartitionedTensor:
    """Flat, cut into as many parts as ``group`` has ranks, of which the first ``numel % ranks`` have one element more.

    ``partition_meta``: what ``to_meta`` gave elsewhere; then ``tensor`` is this rank's part already. Without it
    ``tensor`` is the same whole tensor on every rank. ``full`` is collective over the group.
    """

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: torch.Tensor | None = None) -> None:
        self.group, self.num_parts, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        if partition_meta is None:
            self.orig_size = list(tensor.shape)
            start, length = self.partition[self.rank], self._lengths()[self.rank]
            self.local_data = tensor.detach().reshape(-1).narrow(0, start, length).clone()
        else:
            self.orig_size, self.local_data = self._size_in(partition_meta), tensor

    @classmethod
    def from_meta(cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: Any = None) -> Any:
        """The tensor whose ``to_meta`` is ``meta``; ValueError where it was cut for another number of ranks."""
        return cls(local_part if device is None else local_part.to(device), group, meta)

    @property
    def partition(self) -> list[int]:
        """Where the parts begin, and behind the last one the end."""
        share, longer = divmod(self._numel(), self.num_parts)
        return [part * share + min(part, longer) for part in range(self.num_parts + 1)]

    def _numel(self) -> int:
        return int(torch.Size(self.orig_size).numel())

    def _lengths(self) -> list[int]:
        places = self.partition
        return [end - begin for begin, end in zip(places[:-1], places[1:], strict=True)]

    def _size_in(self, meta: torch.Tensor) -> list[int]:
        dims, *rest = meta.tolist()
        if rest[dims] != self.num_parts:
            raise ValueError(f"the tensor was cut into {rest[dims]} parts, the group has {self.num_parts} ranks")
        return rest[:dims]

    def full_size(self) -> list[int]:
        """The whole tensor's shape."""
        return self.orig_size

    def local_size(self) -> torch.Size:
        """The shape of this rank's part."""
        return self.local_data.shape

    def data(self) -> torch.Tensor:
        """This rank's part, which others may have to be sent."""
        return self.local_data

    def to_meta(self) -> torch.Tensor:
        """int64: number of dimensions, shape, number of parts, this rank, and where the parts begin."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.int64, device=self.local_data.device)

    def full(self, device: Any = None) -> torch.Tensor:
        """The whole tensor, from all ranks of the group. Collective."""
        lengths = self._lengths()
        padded = self.local_data.new_zeros(max(lengths, default=0))
        padded[: self.local_data.numel()] = self.local_data
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        return whole.reshape(self.orig_size) if device is None else whole.reshape(self.orig_size).to(device)
