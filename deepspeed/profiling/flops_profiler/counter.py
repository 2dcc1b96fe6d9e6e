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
    """Return shapes of keys and values with as many heads as the query; torch before 2.13 counts nothing otherwise."""
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
    """Track the modules whose forward is running, and the part of the step, in place of torch's tracker of modules."""

    def __init__(self, ignored: Collection[type[nn.Module]] = ()) -> None:
        self._ignored = tuple(ignored)
        self._running: list[tuple[str, nn.Module, bool]] = []  # name, module, whether a backward runs it again

    def __enter__(self) -> "Whereabouts":
        return self

    def __exit__(self, *_: object) -> None:
        self._running.clear()

    @property
    def recomputing(self) -> bool:
        """Return whether the current operation recomputes activations that a checkpoint has not kept."""
        again = any(again for _, _, again in self._running)
        return inside_backward() and (again or torch.is_grad_enabled())

    def enter(self, name: str, module: nn.Module) -> None:
        """Note that ``module``'s forward begins."""
        self._running.append((name, module, inside_backward()))

    def leave(self, name: str) -> None:
        """Note that the forward of ``name`` has ended, with any forward inside it that was cut short."""
        while self._running and self._running.pop()[0] != name:
            pass

    @property
    def parents(self) -> set[str]:
        """Return the rows an operation counts in: its part of the step and, in a forward, each module around it."""
        if self._ignored and any(isinstance(module, self._ignored) for _, module, _ in self._running):
            return set()
        if inside_backward():
            return {RECOMPUTED if self.recomputing else BACKWARD}
        return {FORWARD, *(module_row(name) for name, _, _ in self._running)}


def module_row(name: str) -> str:
    """Return the row name of a module, which differs from every part of a step."""
    return f"module {name}"


class Counter(FlopCounterMode):
    """Count operations as torch does, in the rows of ``place``; enter it again to go on counting."""

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
        """Return a row's operations. One in five of attention's backward recomputes scores, so it is recomputation."""
        counted = sum(self.rows.get(row, {}).values())
        if row not in (BACKWARD, RECOMPUTED):
            return counted
        again = sum(
            flops // 5
            for op, flops in self.rows.get(BACKWARD, {}).items()
            if "attention" in str(op) and "backward" in str(op)
        )
        return counted - again if row == BACKWARD else counted + again
