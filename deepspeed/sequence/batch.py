"""Batches cut along the sequence: each rank gets its part of the tokens, and the targets that these predict."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from deepspeed.accelerator.device import map_tensors
from deepspeed.comm.collectives import AxisGroup, gather_objects, sum_in_place
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.errors import SequenceError, UsageError
from deepspeed.tensor.differentiable import sum_parts
from deepspeed.zero.regions import bounds

IGNORED = -100  # the label of what has no loss
_FILL = {"labels": IGNORED, "shift_labels": IGNORED}


def shifted(labels: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
    """Return for each token of ``labels`` [rows, tokens] the label of the next one; the last has none."""
    return F.pad(labels[..., 1:], (0, 1), value=ignored)


def is_part(batch: dict[str, Any]) -> bool:
    """Return whether ``batch`` was cut before: its targets are those of its own tokens."""
    labels, targets = batch.get("labels"), batch.get("shift_labels")
    return targets is not None and (labels is None or labels is targets)


def shape_fault(batch: dict[str, Any], needed: tuple[str, ...]) -> str:
    """Return why ``batch`` cannot be cut: it lacks what is ``needed``, or tensors differ in shape; empty if it can."""
    missing = [name for name in needed if not isinstance(batch.get(name), torch.Tensor)]
    if missing:
        return f"the batch has no tensor {' and '.join(repr(name) for name in missing)}, only {sorted(batch)}"
    shape = batch[needed[0]].shape[:2]
    for name in ("labels", "shift_labels", "position_ids", "attention_mask"):
        value = batch.get(name)
        one = name == "position_ids" and isinstance(value, torch.Tensor) and value.shape == (1, shape[-1])
        if isinstance(value, torch.Tensor) and value.shape != shape and not one:
            return f"{name} has the shape {tuple(value.shape)}, and {needed[0]} {tuple(shape)}; make them equal"
    return ""


def whole_batch(batch: dict[str, Any], ids: torch.Tensor, ranks: int) -> dict[str, Any]:
    """Return ``batch`` with position ids and shifted labels, and padded to one token a rank if it is shorter.

    ``ids``: its tensor of tokens [rows, tokens, ...].
    """
    tokens, out = ids.shape[1], dict(batch)
    if out.get("position_ids") is None:
        out["position_ids"] = torch.arange(tokens, device=ids.device).expand(ids.shape[0], -1)
    if out.get("shift_labels") is None:
        out["shift_labels"] = shifted(out["labels"])
    for name, value in out.items() if tokens < ranks else ():
        if _along(value, ids):
            more = (0, 0) * (value.dim() - 2) + (0, ranks - tokens)
            out[name] = F.pad(value, more, value=_FILL.get(name, 0))
    return out


def _along(value: Any, ids: torch.Tensor) -> bool:
    """Return whether ``value`` has an entry for each token."""
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == ids.shape[1]


def taken(value: torch.Tensor, runs: Iterable[range]) -> torch.Tensor:
    """Return these ``runs`` of the tokens of ``value`` [rows, tokens, ...], one after the other."""
    return torch.cat([value[:, run.start : run.stop] for run in runs], dim=1)


def cut(batch: dict[str, Any], ids: torch.Tensor, runs: Iterable[range]) -> dict[str, Any]:
    """Return what of ``batch`` belongs to these ``runs`` of tokens."""
    runs = list(runs)
    return {name: taken(value, runs) if _along(value, ids) else value for name, value in batch.items()}


def part_of(batch: dict[str, Any], ids: torch.Tensor, rank: int, ranks: int) -> dict[str, Any]:
    """Return what of ``batch`` belongs to the tokens of ``rank`` among ``ranks``; parts differ by at most one token."""
    edges = bounds(ids.shape[1], ranks)
    return cut(batch, ids, [range(edges[rank], edges[rank + 1])])


def prepare_autosp_inputs(
    input_id: torch.Tensor,
    label_id: torch.Tensor,
    position_id: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    seq_dim: int = 1,
) -> tuple[torch.Tensor | None, ...]:
    """Return the first four arguments, whole batches that the engine cuts under the pass ``autosp`` of the block
    ``compile``. SequenceError, a ValueError, for tensors that it cannot cut: they are [rows, tokens] each.
    """
    batch = {"input_ids": input_id, "labels": label_id, "position_ids": position_id, "attention_mask": attention_mask}
    fault = f"seq_dim is {seq_dim}, and tokens are dimension 1" if seq_dim not in (1, -1) else ""
    if fault := fault or shape_fault(batch, ("input_ids", "labels")):
        raise SequenceError(f"prepare_autosp_inputs: {fault}")
    return tuple(batch.values())


def weighed(mean: torch.Tensor, count: torch.Tensor, total: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Return the mean loss of a sequence with ``total`` targets from the ``mean`` over the ``count`` of this rank. Its
    gradient goes to this rank's tokens alone. Collective.
    """
    share = (count / total.clamp(min=1)).to(mean.dtype)
    return sum_parts(torch.where(count > 0, mean, 0.0) * share, group)  # the mean over no target is no number


def mean_of_parts(mean: torch.Tensor, labels: Any, group: AxisGroup) -> torch.Tensor:
    """Return the ``weighed`` loss from this rank's ``labels``, or from their number. Collective. Raise UsageError where
    they are neither.
    """
    if isinstance(labels, torch.Tensor) and labels.dim():
        labels = labels.ne(IGNORED).sum()
    elif not isinstance(labels, (int, float, torch.Tensor)):
        raise UsageError(
            f"the labels of a part of a sequence are a {type(labels).__name__}, not a tensor in which {IGNORED} marks "
            "what has no loss; let loss_fn return a pair: the mean over this rank's tokens, and their number"
        )
    count = torch.as_tensor(labels, dtype=torch.float32, device=mean.device)
    return weighed(mean, count, sum_in_place(count.clone(), group), group)


class UlyssesSPDataLoaderAdapter:
    """Iterator over ``dl``, whose batches differ between the ranks of ``sp_group``: it takes one from each of these,
    and yields them one after the other, cut along the sequence so that each rank has its part.

    Batches are dicts with ``input_ids``, ``labels`` and ``position_ids``, [rows, tokens] each; ``labels`` become
    ``shift_labels``. ValueError on all ranks for other batches, and for a length that ``sp_world_size`` does not
    divide. Tensors are on the host. It has ``sp_world_size`` times as many batches as ``dl``.
    """

    def __init__(self, dl: Iterable[Any], sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl, self.device = dl, device
        self.sp_rank, self.sp_group, self.sp_world_size = sp_rank, sp_group, sp_world_size
        self.iter: Iterator[Any] = iter(())
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size  # type: ignore[arg-type]

    def __iter__(self) -> "UlyssesSPDataLoaderAdapter":
        self.iter = iter(self.dl)
        self.micro_batches.clear()
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Take one batch from each rank. Collective. StopIteration on all ranks where one has no more."""
        batch = next(self.iter, None)
        batch = None if batch is None else map_tensors(dict(batch), lambda tensor: tensor.cpu())
        everyone = gather_objects(batch, plain_mesh("", group=self.sp_group).job)
        if any(one is None for one in everyone):
            raise StopIteration
        for owner, one in enumerate(everyone):
            fault = shape_fault(one, ("input_ids", "labels", "position_ids"))
            tokens = 0 if fault else one["input_ids"].shape[1]
            if not fault and tokens % self.sp_world_size:
                fault = f"its {tokens} tokens do not divide over {self.sp_world_size} ranks; pad to a multiple"
            if fault:
                raise SequenceError(f"UlyssesSPDataLoaderAdapter, batch of sequence-parallel rank {owner}: {fault}")
            whole = whole_batch(one, one["input_ids"], self.sp_world_size)
            del whole["labels"]
            self.micro_batches.append(part_of(whole, one["input_ids"], self.sp_rank, self.sp_world_size))

    def __getattr__(self, name: str) -> Any:
        if name in ("dl", "iter"):  # not made yet: a copy or an unpickled one
            raise AttributeError(name)
        return getattr(self.dl, name)
