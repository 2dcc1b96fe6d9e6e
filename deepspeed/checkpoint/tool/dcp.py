"""Checkpoints for torch.distributed.checkpoint, written without a process group, one tensor in memory at a time."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from deepspeed.checkpoint.weights.weights import Progress, Stream


class StreamPlanner(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each one's values when its turn has come."""

    def __init__(self, advance: Progress) -> None:
        super().__init__()
        self._streams, self._advance = dict[str, Stream](), advance

    def stand_in(self, value: Any, path: str = "") -> Any:
        """``value`` with, for each tensor, one of its shape whose one element takes the place of all."""
        if isinstance(value, dict):
            return {k: self.stand_in(v, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
        if not isinstance(value, Stream):
            return value
        self._streams[path] = value
        return torch.zeros((), dtype=value.dtype).expand(value.shape)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The values of one item."""
        values = self._streams.get(write_item.index.fqn)
        if write_item.type == WriteItemType.BYTE_IO or values is None:
            return super().resolve_data(write_item)
        self._advance(values.nbytes)
        return values.whole()


def write_dcp(out: Path, tree: dict[str, Any], advance: Progress) -> None:
    """Write ``tree`` (nested dicts of Stream, numbers, str, lists) to the folder ``out``.

    Nested names are joined by dots, as torch.distributed.checkpoint does. Holds up to three times the largest tensor.
    Raises OSError.
    """
    planner = StreamPlanner(advance)
    # One file per tensor: the writer keeps everything that goes into a file until the file is complete.
    writer = torch_checkpoint.FileSystemWriter(out, single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is intended
        torch_checkpoint.save(planner.stand_in(tree), storage_writer=writer, planner=planner, no_dist=True)
