"""Cross-entropy where ranks have parts of a sequence, of the words, or of both.

The gradient of a rank's logits is that of its own tokens: gradients of parameters are summed over the ranks of a
sequence, as an engine does whose mesh has that axis.
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from deepspeed.comm.collectives import AxisGroup
from deepspeed.errors import UsageError
from deepspeed.sequence.batch import IGNORED, shifted
from deepspeed.sequence.layout import in_turn
from deepspeed.tensor.differentiable import join_parts, sum_parts
from deepspeed.tensor.layers import LinearLayer, shared_input
from deepspeed.tensor.loss import losses_over_parts

Reduction = Literal["mean", "sum", "none"]


def _axis(group: Any) -> AxisGroup | None:
    """Return the group of several ranks, or None."""
    axis = None if group is None else shared_input(group).group
    return None if axis is None or axis.size == 1 else axis


def _whole_sequence(losses: torch.Tensor, dim: int, group: AxisGroup | None) -> torch.Tensor:
    """Join the losses of the ranks along the sequence, whose parts may differ in length. Collective."""
    if group is None:
        return losses
    lengths = in_turn([losses.shape[dim]], group, losses.device)
    return join_parts(losses, group, dim, edges=[0, *lengths.view(-1).cumsum(0).tolist()])


def vocab_sequence_parallel_cross_entropy(logits: torch.Tensor, target: torch.Tensor, sp_group: Any) -> torch.Tensor:
    """Return the losses [S, ...] of all tokens from ``logits`` [S / ranks, ..., words] of this rank's. Collective."""
    rows = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), reduction="none")
    return _whole_sequence(rows.view(target.shape), 0, _axis(sp_group))


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = IGNORED,
    reduction: Reduction = "mean",
    gather_sequence_loss: bool = False,
    backend: str = "torch",
) -> torch.Tensor:
    """Return the cross-entropy of ``logits`` [..., this rank's words] and ``target`` [...] over all words. Collective.

    The mean and the sum are over the tokens of all ranks of ``sp_group``. Raises UsageError for words that do not fit
    the logits. A label that is no word makes it NaN, or raises where this rank has all words.

    Args:
        tp_group: Ranks that have the logits of other words of the same tokens.
        sp_group: Ranks that have other tokens of the same sequence.
        vocab_start_index, vocab_end_index: This rank's words; None: all are divided evenly, in rank order.
        global_vocab_size: Number of words; logits behind them, as of a padded head, are left out.
        gather_sequence_loss: With reduction "none", return the losses of the whole sequence (the last dimension).
        backend: "torch".
    """
    if backend != "torch" or reduction not in ("mean", "sum", "none"):
        raise UsageError(
            f"vocab_parallel_cross_entropy: backend {backend!r}, reduction {reduction!r}: there is the backend "
            "'torch', with 'mean', 'sum' and 'none'"
        )
    tp, sp, width = _axis(tp_group), _axis(sp_group), logits.shape[-1]
    if vocab_start_index is None and tp is None:
        vocab_start_index = 0
    if vocab_start_index is not None:
        if vocab_end_index not in (None, vocab_start_index + width):
            raise UsageError(
                f"vocab_parallel_cross_entropy: words {vocab_start_index} to {vocab_end_index} are not the {width} of "
                "the logits; vocab_end_index is vocab_start_index + logits.shape[-1]"
            )
        if global_vocab_size is not None and vocab_start_index >= global_vocab_size:
            raise UsageError(
                f"vocab_parallel_cross_entropy: this rank's words begin at {vocab_start_index}, behind all "
                f"{global_vocab_size}; divide them so that each rank has one"
            )
        if global_vocab_size is not None:
            logits = logits[..., : global_vocab_size - vocab_start_index]
    if tp is None:
        flat = logits.reshape(-1, logits.shape[-1]).float()
        rows = functional.cross_entropy(flat, target.reshape(-1), ignore_index=ignore_index, reduction="none")
        losses = rows.view(target.shape)
    else:
        losses = losses_over_parts(logits, target, tp, ignore_index=ignore_index, first=vocab_start_index)
    if reduction == "none":
        return _whole_sequence(losses, losses.dim() - 1, sp) if gather_sequence_loss else losses
    total, count = losses.sum(), (target != ignore_index).sum().to(losses.dtype)
    if sp is not None:
        total, count = sum_parts(total, sp), sum_parts(count, sp)
    return total / count if reduction == "mean" else total


class VocabParallelCrossEntropyLoss(nn.Module):
    """``vocab_parallel_cross_entropy`` with its options fixed."""

    def __init__(self, tp_group: Any = None, sp_group: Any = None, **options: Any) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"tp_group": tp_group, "sp_group": sp_group, **options}

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``logits`` [..., words of this rank]."""
        return vocab_parallel_cross_entropy(logits, target, **self.options)


class VocabParallelCausalLMLoss(VocabParallelCrossEntropyLoss):
    """The same as the ``loss_function`` of a model of Transformers."""

    def forward(  # type: ignore[override]
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int | None = None,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return the mean over the tokens that have a label, or their sum divided by ``num_items_in_batch``.

        Raises UsageError for ``labels`` of a part of a sequence, whose last token is followed by another rank's.
        """
        options = {"ignore_index": IGNORED, **self.options}
        if ignore_index is not None:
            options["ignore_index"] = ignore_index
        if shift_labels is None:
            if labels is None or _axis(options["sp_group"]) is not None:
                raise UsageError("VocabParallelCausalLMLoss: a part of a sequence needs shift_labels, not labels")
            shift_labels = shifted(labels, options["ignore_index"])
        if num_items_in_batch is not None:
            options["reduction"] = "sum"
        loss = vocab_parallel_cross_entropy(logits, shift_labels.to(logits.device), **options)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def configure_vocab_parallel_loss(
    model: nn.Module, head: nn.Module, sp_group: Any = None, ignore_index: int = IGNORED, backend: str = "torch"
) -> VocabParallelCausalLMLoss:
    """Let ``model`` compute its ``loss_function`` from the logits of ``head``, and return it.

    The logits of a head that tensor-parallel ranks divide by words stay divided.
    """
    options: dict[str, Any] = {"ignore_index": ignore_index, "backend": backend}
    if isinstance(head, LinearLayer):
        index = head.group.index
        first, end = head.edges[index], head.edges[index + 1]
        options |= {"tp_group": head.group, "vocab_start_index": first, "vocab_end_index": end}
        head.gather_output = False
    loss = VocabParallelCausalLMLoss(sp_group=sp_group, **options)
    object.__setattr__(model, "loss_function", loss)  # where it is a property, torch would go past its setter
    return loss
