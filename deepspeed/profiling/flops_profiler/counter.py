"""Floating-point operations as torch counts them, by the modules and the part of a training step that they belong to.

Counted are matrix products, convolutions and attention, two for each multiply-add, from the shapes; what is done one
element at a time counts nothing. Attention counts the whole square of scores, with or without a causal mask.
Private torch name: ``FlopCounterMode.mod_tracker``, which is replaced by what this file knows of the modules.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from deepspeed.zero.hooks import inside_backward

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"
_aten = torch.ops.aten


def _repeated(query: Any, *heads: Any) -> tuple[Any, ...]:
    """Shapes of keys and values with as many heads as the query, without which torch before 2.13 counts nothing."""
    return tuple((shape[0], query[1], *shape[2:]) for shape in heads)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, *_repeated(query, key, value)))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, *_repeated(query, key, value)))


# torch's own table leaves out the last two: those of CPUs and of devices that bring their own.
_KERNELS = "flash_attention efficient_attention cudnn_attention flash_attention_for_cpu fused_attention_overrideable"
_FORMULAS = {
    getattr(_aten, f"_scaled_dot_product_{kernel}{end}"): formula
    for kernel in _KERNELS.split()
    for end, formula in (("", _attention), ("_backward", _attention_backward))
}


class Whereabouts:
    """The modules whose forward is under way, and the part of the step; in the place of torch's tracker of modules."""

    def __init__(self, ignored: Collection[type[nn.Module]] = ()) -> None:
        self._ignored = tuple(ignored)
        self._running: list[tuple[str, nn.Module, bool]] = []  # name, module, whether a backward runs it again

    def __enter__(self) -> "Whereabouts":
        return self

    def __exit__(self, *_: object) -> None:
        self._running.clear()

    @property
    def recomputing(self) -> bool:
        """Whether what runs now makes again what a checkpoint has not kept."""
        again = any(again for _, _, again in self._running)
        return inside_backward() and (again or torch.is_grad_enabled())

    def enter(self, name: str, module: nn.Module) -> None:
        """``module``'s forward begins."""
        self._running.append((name, module, inside_backward()))

    def leave(self, name: str) -> None:
        """It has ended, with whatever began inside and was cut short."""
        while self._running and self._running.pop()[0] != name:
            pass

    @property
    def parents(self) -> set[str]:
        """The rows that an operation counts in: its part of the step and, in a forward, every module around it."""
        if self._ignored and any(isinstance(module, self._ignored) for _, module, _ in self._running):
            return set()
        if inside_backward():
            return {RECOMPUTED if self.recomputing else BACKWARD}
        return {FORWARD, *(module_row(name) for name, _, _ in self._running)}


def module_row(name: str) -> str:
    """The row of a module, which no part of a step can be confused with."""
    return f"module {name}"


class Counter(FlopCounterMode):
    """torch's counter with the rows of ``place``; enter it again to go on counting."""

    def __init__(self, place: Whereabouts) -> None:
        super().__init__(display=False, custom_mapping=_FORMULAS)
        self.place = place
        self.mod_tracker: Any = place
        self.rows: dict[str, dict[Any, int]] = {}

    def __exit__(self, *args: Any) -> Any:
        result = super().__exit__(*args)
        for name, ops in self.flop_counts.items():  # which the next entry begins anew
            row = self.rows.setdefault(name, {})
            for op, flops in ops.items():
                row[op] = row.get(op, 0) + flops
        self.flop_counts.clear()
        return result

    def flops(self, row: str) -> int:
        """The operations of a row. One in five of attention's backward makes the scores again: it is recomputation."""
        counted = sum(self.rows.get(row, {}).values())
        if row not in (BACKWARD, RECOMPUTED):
            return counted
        again = sum(
            flops // 5
            for op, flops in self.rows.get(BACKWARD, {}).items()
            if "attention" in str(op) and "backward" in str(op)
        )
        return counted - again if row == BACKWARD else counted + again
