"""Cross-entropy over logits of which every tensor-parallel rank has those of some words."""

from typing import Any

import torch

from deepspeed.comm.collectives import AxisGroup, all_gather, sum_in_place
from deepspeed.errors import UsageError
from deepspeed.zero.regions import bounds


class _PartsCrossEntropy(torch.autograd.Function):
    """Compute per-row -log softmax(logits)[label]: 0 for the label ``ignore``, NaN for one that is no word."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: AxisGroup, ignore: int, first: int | None
    ) -> torch.Tensor:
        lo = _edges(logits, group)[group.index] if first is None else first
        hi = lo + logits.shape[-1]
        wide = logits.float()
        largest = wide.amax(-1)
        gathered = largest.new_empty(group.size, len(largest))
        all_gather(gathered.view(-1), largest.contiguous(), group).wait()
        top = gathered.amax(0).unsqueeze(-1)
        exponentials = wide.sub_(top) if wide is not logits else wide - top
        inside = (labels >= lo) & (labels < hi)
        rows = (labels - lo).masked_fill(~inside, 0).unsqueeze(-1)
        chosen = exponentials.gather(-1, rows).squeeze(-1).masked_fill(~inside, 0)
        exponentials = exponentials.exp_()
        totals, chosen, known = sum_in_place(torch.stack([exponentials.sum(-1), chosen, inside.float()]), group)
        counts = labels != ignore
        totals.masked_fill_(counts & (known == 0), torch.nan)  # of the gradient, too, and nobody waits for the device
        ctx.save_for_backward(exponentials.div_(totals.unsqueeze(-1)), rows, inside, counts)
        ctx.dtype = logits.dtype
        return (totals.log() - chosen).masked_fill(~counts, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        shares, rows, inside, counts = ctx.saved_tensors
        weight = grad.masked_fill(~counts, 0).unsqueeze(-1)
        out = shares * weight
        out.scatter_add_(-1, rows, -weight * inside.unsqueeze(-1))
        return out.to(ctx.dtype), None, None, None, None


def _edges(logits: torch.Tensor, group: AxisGroup) -> list[int]:
    sizes = torch.zeros(group.size, device=logits.device, dtype=torch.float64)
    sizes[group.index] = logits.shape[-1]
    words = int(sum_in_place(sizes, group).sum())
    edges = bounds(words, group.size)
    if edges[group.index + 1] - edges[group.index] != logits.shape[-1]:
        raise UsageError(
            f"tensor-parallel rank {group.index} has {logits.shape[-1]} of {words} logits; cut them evenly"
        )
    return edges


def losses_over_parts(
    logits: torch.Tensor, labels: torch.Tensor, group: AxisGroup, *, ignore_index: int, first: int | None
) -> torch.Tensor:
    """Return the cross-entropy of each of ``labels`` (...), in fp32, from ``logits`` (..., this rank's words).

    ``labels`` count all words and are the same on every rank of ``group``. ``first`` is the number of this rank's first
    word; None: the words are cut evenly. Collective.
    """
    flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    losses: torch.Tensor = _PartsCrossEntropy.apply(*flat, group, ignore_index, first)
    return losses.view(labels.shape)


def loss_fault(model: Any) -> str:
    """Return why labels of ``model``, of Transformers, are not those of the next tokens; empty if they can be."""
    kind = getattr(model, "loss_type", None)
    if kind in (None, "ForCausalLM", "ForConditionalGeneration"):
        return ""
    return f"the labels of {type(model).__name__} are not those of the next tokens (its loss is {kind})"
