"""Micro-batches weighed by their tokens (``"normalize"``): an update is that of all its tokens together.

The mean loss of a micro-batch times its count of tokens, summed over ranks and micro-batches and divided by the count
of them all, is the mean over all tokens, however they are split. The division comes with the update, as nobody knows
the count before (``zero.step.take_step``).
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives import AxisGroup, sum_in_place
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.loss_scale import computes_in_fp16
from deepspeed.errors import UsageError

IGNORED = -100  # the label of what has no loss
_ADVICE = "call engine.set_batch_tokens(count) between the forward and backward(), or leave 'normalize' out"


class TokenWeights:
    """Token counts of one window on one rank. Nothing is read from the device."""

    def __init__(self, config: DeepSpeedConfig, device: torch.device, mesh: Mesh) -> None:
        self._sequence, self._whole = mesh.sp, mesh.cuts  # the ranks that share each batch; they all get the whole
        self._shift, self._narrow = config.normalize == "next_tokens", computes_in_fp16(config)
        self._count: torch.Tensor | int | None = None  # of the last forward
        self._forwards, self._twice = 0, False  # since the last backward; another has weighed its loss already
        self._anew = False  # the next forward is the first of a window
        self.noted = 0  # forwards, ever
        self._weight: torch.Tensor | None = None  # of the last backward
        self._device, self._by_caller = device, False
        # A weight of 1 in tokens: in fp16, whose range is small, a power of two near the usual count.
        self.unit = 1.0
        self.total = self._nothing()

    def _nothing(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)

    def listen(self, model: nn.Module, recomputes: Callable[[], bool]) -> Callable[[], None]:
        """Note every forward of ``model`` that trains, through an engine or not; return the function that ends that."""

        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            trains = called.training and torch.is_grad_enabled() and not recomputes()
            if trains and called is model_ref():  # a copy of the model has its hooks, too
                self.note(args, kwargs)

        model_ref = weakref.ref(model)
        return model.register_forward_pre_hook(torch.compiler.disable(before), with_kwargs=True, prepend=True).remove

    def mean(self, job: AxisGroup) -> float:
        """Return the mean over the ranks of the window's weight so far. Collective; waits for the device."""
        return float(sum_in_place(self.total.clone(), job)) / job.size

    def note(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a forward that sets out: count its labels, given by name or in a mapping."""
        given = [kwargs, *(value for value in inputs if hasattr(value, "keys"))]
        labels, parts = (
            next((g[name] for g in given if isinstance(g.get(name), torch.Tensor)), None)
            for name in ("labels", "shift_labels")
        )
        self._twice = any(g.get("num_items_in_batch") is not None for g in given)
        self._forwards, self.noted = 1 if self._anew else self._forwards + 1, self.noted + 1
        self._count, self._anew = None, False
        if labels is not None:
            count = (labels[..., 1:] if self._shift else labels).ne(IGNORED).sum()
            self._count = count if self._whole else sum_in_place(count, self._sequence)
        elif parts is not None:  # of a sequence that was cut
            self._count = sum_in_place(parts.ne(IGNORED).sum(), self._sequence)

    def withdraw(self, noted: int) -> None:
        """Withdraw a failed forward, if it was noted; ``noted``: how many forwards were when it began."""
        if self.noted > noted:
            self._forwards, self._count, self._twice = self._forwards - 1, None, False

    def tell(self, count: torch.Tensor | int) -> None:
        """Set the number of tokens of the next backward, as the caller has counted them."""
        self._count, self._forwards, self._twice, self._anew = count, 1, False, False

    def weight(self) -> torch.Tensor:
        """Return the weight (0-dim float64) of the loss of the next backward. UsageError if its tokens are unknown."""
        if self._forwards == 0 and self._weight is not None:  # another loss of the same forward
            return self._weight
        if self._twice or self._by_caller:
            how = "num_items_in_batch" if self._twice else "backward(scale_wrt_gas=False)"
            raise UsageError(
                f"'normalize' weighs losses by tokens, and {how} says that this window's losses are weighed already; "
                "leave one of them out"
            )
        if self._forwards != 1 or self._count is None:
            fault = "the forward had no tensor 'labels'" if self._forwards == 1 else f"{self._forwards} forwards came"
            raise UsageError(f"'normalize' weighs losses by tokens, and {fault} before this backward: {_ADVICE}")
        count = torch.as_tensor(self._count, dtype=torch.float64).to(self._device)
        self._weight, self._forwards, self._count = count / self.unit, 0, None
        self.total = self.total + self._weight
        return self._weight

    def weighed(self, loss: torch.Tensor, *, by_caller: bool) -> torch.Tensor:
        """Return ``loss``, before its backward, times its weight, unless the caller has weighed it."""
        if not by_caller:
            return torch.where(self.weight() > 0, loss, 0.0) * self.weight().to(loss)  # of no token it is no number
        if self._weight is not None:
            raise UsageError("backward(scale_wrt_gas=False) in a window of which 'normalize' has weighed other losses")
        self._by_caller, self._forwards, self._twice = True, 0, False
        return loss

    def end_window(self, mean: float) -> None:
        """End the window; ``mean``: mean weight of a rank's micro-batches, the same number on all ranks."""
        self.forget()
        if self._narrow and mean > 0:
            self.unit *= 2.0 ** round(math.log2(mean))

    def forget(self) -> None:
        """Begin the window anew; its first loss may be of a forward that is over, as with ``zero_grad`` between."""
        self.total, self._weight, self._by_caller, self._anew = self._nothing(), None, False, True

    def state(self, job: AxisGroup) -> dict[str, float]:
        """Return the state for a checkpoint: the unit and the window's mean over the ranks. Collective."""
        return {"unit": self.unit, "total": self.mean(job)}

    def restore(self, state: dict[str, float], *, window: bool) -> None:
        """Restore the result of ``state``, on as many ranks as there are now; ``window``: with its gradients."""
        self.unit = state["unit"]
        self.total = self._nothing() + (state["total"] if window else 0.0)
