"""Cross-entropy over parts of words and of a sequence equals that of one process, gradients too."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from deepspeed.errors import UsageError
from deepspeed.sequence.cross_entropy import (
    VocabParallelCausalLMLoss,
    VocabParallelCrossEntropyLoss,
    configure_vocab_parallel_loss,
    vocab_parallel_cross_entropy,
    vocab_sequence_parallel_cross_entropy,
)
from deepspeed.tensor.layers import LinearLayer
from deepspeed.tools.verify.grads import scaled_error

WORDS, PADDED, LENGTH = 13, 16, 9


def _groups() -> tuple[Any, Any]:
    """Ranks 0 and 1, 2 and 3 have other words; 0 and 2, 1 and 3 other tokens."""
    made = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    mine = [group for ranks, group in made.items() if dist.get_rank() in ranks]
    return mine[0], mine[1]


def _apart(reduction: Any, padded: bool) -> list[float]:
    tp, sp = _groups()
    torch.manual_seed(0)
    whole = torch.randn(2, LENGTH, PADDED if padded else WORDS, requires_grad=True)
    target = torch.randint(WORDS, (2, LENGTH))
    target[0, :4] = -100
    weights = torch.rand(2, LENGTH) if reduction == "none" else torch.rand(())
    wanted = functional.cross_entropy(whole[..., :WORDS].flatten(0, 1), target.flatten(), reduction=reduction)
    wanted = wanted.view(2, LENGTH) if reduction == "none" else wanted
    (wanted * weights).sum().backward()
    # five tokens and four; eight words and eight of the padded ones, or six and seven of all
    tokens = slice(0, 5) if dist.get_rank() < 2 else slice(5, LENGTH)
    edge = 8 if padded else 6
    words = (0, edge) if dist.get_rank() % 2 == 0 else (edge, whole.shape[-1])
    part = whole.detach()[:, tokens, slice(*words)].clone().requires_grad_()
    size = WORDS if padded else None
    options = {"vocab_start_index": words[0], "vocab_end_index": words[1], "global_vocab_size": size}
    how = {"reduction": reduction, "gather_sequence_loss": True}
    loss = VocabParallelCrossEntropyLoss(tp, sp, **options, **how)(part, target[:, tokens])
    (loss * weights).sum().backward()
    assert whole.grad is not None and part.grad is not None
    own = whole.grad[:, tokens, slice(*words)]
    return [scaled_error(loss, wanted), scaled_error(part.grad, own)]


@pytest.mark.parametrize(("reduction", "padded"), [("mean", False), ("sum", True), ("none", False)])
def test_words_and_tokens_of_four_ranks(pool4: Any, reduction: str, padded: bool) -> None:
    for apart in pool4.run(_apart, reduction, padded):
        assert max(apart) <= 1e-6, apart


class Headed(nn.Module):
    """Its loss is a property, as in the models of Transformers."""

    @property
    def loss_function(self) -> Any:
        return getattr(self, "_loss_function", functional.cross_entropy)

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value


def _of_sequences() -> list[float]:
    sp = dist.new_group([0, 1])
    torch.manual_seed(0)
    whole, target = torch.randn(LENGTH, 2, WORDS, requires_grad=True), torch.randint(WORDS, (LENGTH, 2))
    weights = torch.rand(LENGTH, 2)
    wanted = functional.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="none").view(LENGTH, 2)
    (wanted * weights).sum().backward()
    tokens = slice(0, 5) if dist.get_rank() == 0 else slice(5, LENGTH)
    part = whole.detach()[tokens].clone().requires_grad_()
    loss = vocab_sequence_parallel_cross_entropy(part, target[tokens], sp)
    (loss * weights).sum().backward()
    assert whole.grad is not None and part.grad is not None
    apart = [scaled_error(loss, wanted), scaled_error(part.grad, whole.grad[tokens])]

    head, model, hidden = nn.Linear(4, WORDS), Headed(), torch.randn(2, LENGTH, 4)
    labels = torch.randint(WORDS, (2, LENGTH))
    whole = head(hidden)
    split = LinearLayer(head, sp, gather_output=True)
    loss_of = configure_vocab_parallel_loss(model, split)
    rows = whole[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    for number, reduction in ((None, "mean"), (7, "sum")):
        found = model.loss_function(split(hidden), labels, vocab_size=WORDS, num_items_in_batch=number)
        apart.append(scaled_error(found, functional.cross_entropy(*rows, reduction=reduction) / (number or 1)))
    assert loss_of is model.loss_function and not split.gather_output
    with pytest.raises(UsageError, match="needs shift_labels"):
        VocabParallelCausalLMLoss(sp_group=sp)(whole, labels)
    return apart


def test_losses_of_a_whole_sequence_and_of_a_model(pool2: Any) -> None:
    for apart in pool2.run(_of_sequences):
        assert max(apart) <= 1e-6, apart


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "triton"}, "there is the backend 'torch'"),
        ({"vocab_start_index": 2, "vocab_end_index": 9}, "2 to 9 are not the 13"),
        ({"vocab_start_index": 13, "global_vocab_size": 13}, "begin at 13, behind all 13"),
    ],
)
def test_words_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        vocab_parallel_cross_entropy(torch.randn(3, 13), torch.zeros(3, dtype=torch.long), **options)


def _of_no_word() -> tuple[list[float], list[bool]]:
    part = torch.zeros(3, 5, requires_grad=True)
    losses = vocab_parallel_cross_entropy(part, torch.tensor([10, 3, -100]), dist.group.WORLD, reduction="none")
    losses.sum().backward()
    assert part.grad is not None
    return losses.tolist(), part.grad.isnan().any(1).tolist()


def test_the_loss_of_a_label_that_is_no_word_is_no_number_and_its_gradient_neither(pool2: Any) -> None:
    for losses, spoilt in pool2.run(_of_no_word):
        assert losses == pytest.approx([math.nan, math.log(10), 0.0], nan_ok=True) and spoilt == [True, False, False]
