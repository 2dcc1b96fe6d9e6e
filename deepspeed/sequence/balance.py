"""The routers' balance loss of mixture-of-experts models over whole sequences, not over a rank's part of each.

It is a product of two means over tokens, so the mean of the parts' losses is another number.
"""

import functools
import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from deepspeed.sequence.attention import in_progress
from deepspeed.tensor.differentiable import join_parts

_NAME = "load_balancing_loss_func"


def balance_whole_sequences(model: Any) -> None:
    """Let the balance loss of ``model``'s class join the tokens of a sequence's ranks, in forwards on parts."""
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        home = sys.modules.get(kind.__module__)
        function = getattr(home, _NAME, None)
        if function is not None and not hasattr(function, "__wrapped__"):
            setattr(home, _NAME, _over_ranks(function))


def _over_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def whole(gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None) -> Any:
        layout, share = in_progress()
        if layout is None or not isinstance(gate_logits, tuple):
            return function(gate_logits, num_experts, top_k, attention_mask)
        edges = [0, *accumulate(layout.lengths)]

        def join(rows: torch.Tensor) -> torch.Tensor:
            return join_parts(rows, layout.group, 1, edges=edges, partial_gradient=True)

        logits = tuple(join(part.reshape(layout.rows, -1, part.shape[-1])).flatten(0, 1) for part in gate_logits)
        mask = None if attention_mask is None else join(attention_mask.to(gate_logits[0].device))
        return function(logits, num_experts, top_k, mask) * share

    return torch.compiler.disable(whole)
