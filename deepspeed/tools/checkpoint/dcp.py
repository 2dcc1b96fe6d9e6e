"""``export --format dcp``: for torch.distributed.checkpoint, written without a process group, a tensor at a time."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from deepspeed.checkpoint.foreign.weights import Progress, Stream, stream, total_bytes
from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.save.writer import progress


class _StreamPlanner(DefaultSavePlanner):
    """Plan with tensors whose one element takes the place of all, and read the values of each tensor in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[str, Stream] = {}  # by their names joined with dots, as torch.distributed.checkpoint does
        self.advance: Progress = lambda _bytes: None

    def stand_in(self, path: str, values: Stream) -> torch.Tensor:
        self.streams[path] = values
        return torch.zeros((), dtype=values.dtype).expand(values.shape)

    def resolve_data(self, write_item: WriteItem) -> Any:
        values = self.streams.get(write_item.index.fqn)
        if values is None:
            return super().resolve_data(write_item)
        self.advance(values.nbytes)
        return values.whole()


def write_dcp(source: Source, out: Path, model: Mapping[str, Stream]) -> None:
    """Write weights, and optimizer state by parameter names in the shape of torch.distributed.checkpoint.state_dict.

    Holds up to three times the largest tensor. Raises OSError.
    """
    planner, facts = _StreamPlanner(), source.facts.get("optimizer") or {}
    weights = {name: planner.stand_in(f"model.{name}", values) for name, values in model.items()}
    state: dict[str, dict[str, torch.Tensor]] = {
        name: {slot: v if isinstance(v, torch.Tensor) else torch.tensor(float(v)) for slot, v in scalars.items()}
        for name, scalars in (facts.get("scalars") or {}).items()
    }
    for key in (key for key in source.entries if key[0].startswith("optim.")):
        slot, name = key[0].removeprefix("optim."), key[1]
        state.setdefault(name, {})[slot] = planner.stand_in(f"optim.state.{name}.{slot}", stream(source, key))
    groups = [{**group["options"], "params": list(group["names"])} for group in facts.get("groups") or []]
    optim = {"state": state, "param_groups": groups} if state or groups else {}
    tree = {"model": weights, "optim": optim, "engine": source.facts.get("engine") or {}}
    # One file per tensor: the writer keeps everything that goes into a file until the file is complete.
    writer = torch_checkpoint.FileSystemWriter(out, single_file_per_rank=False)
    with warnings.catch_warnings(), progress("export", total_bytes(planner.streams.values())) as planner.advance:
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is intended
        torch_checkpoint.save(
            {k: v for k, v in tree.items() if v}, storage_writer=writer, planner=planner, no_dist=True
        )
