"""A tensor of which every rank of a group keeps one flat part, as pipelines of clients send them."""

from typing import Any

import torch
import torch.distributed as dist

from deepspeed.client.attrs import answers
from deepspeed.comm.differentiable import bounds, widths


class PartitionedTensor:
    """Flat tensor, split into one part per rank of ``group``; the first ``numel % ranks`` parts have one element more.

    ``partition_meta``: result of ``to_meta`` elsewhere; then ``tensor`` is this rank's part already. Without it
    ``tensor`` is the same whole tensor on every rank. ``full`` is collective over the group.
    """

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: torch.Tensor | None = None) -> None:
        self.group, self.num_parts, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        if partition_meta is None:
            self.orig_size = list(tensor.shape)
            start, length = self.partition[self.rank], widths(self.partition)[self.rank]
            self.local_data = tensor.detach().reshape(-1).narrow(0, start, length).clone()
        else:
            dims, *rest = partition_meta.tolist()
            if rest[dims] != self.num_parts:
                raise ValueError(f"the tensor was cut into {rest[dims]} parts, the group has {self.num_parts} ranks")
            self.orig_size, self.local_data = rest[:dims], tensor

    @classmethod
    def from_meta(cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: Any = None) -> Any:
        """Make the tensor whose ``to_meta`` is ``meta``; ValueError where it was split for another number of ranks."""
        return cls(local_part if device is None else local_part.to(device), group, meta)

    @property
    def partition(self) -> list[int]:
        """Return the first index of each part, and the end of the last."""
        return bounds(torch.Size(self.orig_size).numel(), self.num_parts)

    full_size = answers("orig_size", "The whole tensor's shape.")
    local_size = answers("local_data.shape", "The shape of this rank's part.")
    data = answers("local_data", "This rank's part, which others may have to be sent.")

    def to_meta(self) -> torch.Tensor:
        """Return int64: number of dimensions, shape, number of parts, this rank, and the bounds of the parts."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.int64, device=self.local_data.device)

    def full(self, device: Any = None) -> torch.Tensor:
        """Return the whole tensor, gathered from all ranks of the group. Collective."""
        lengths = widths(self.partition)
        padded = self.local_data.new_zeros(max(lengths, default=0))
        padded[: self.local_data.numel()] = self.local_data
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        return whole.reshape(self.orig_size) if device is None else whole.reshape(self.orig_size).to(device)
