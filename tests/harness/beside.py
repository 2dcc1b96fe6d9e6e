"""The largest errors of an engine beside one process that trains the same model on the batches of all ranks."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.tools.verify.grads import scaled_error
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

CLIP = 0.5


class Beside(dict[str, float]):
    """Errors of ``engine`` by what they are of. ``plain`` is trained by ``optimizer``."""

    def __init__(self, engine: Any, plain: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.engine, self.optimizer = engine, optimizer
        self.trained = {name: param for name, param in plain.named_parameters() if param.requires_grad}

    def __reduce__(self) -> Any:
        """Return to the test as a plain dict."""
        return dict, ({**self},)

    def note(self, what: str, error: float) -> None:
        """Keep the larger error; one that is no number is infinite."""
        self[what] = max(self.get(what, 0.0), math.inf if math.isnan(error) else error)

    def loss(self, ours: Tensor, theirs: Tensor) -> None:
        self.note("loss", abs(float(ours.detach() - theirs.detach())))

    def gradients(self) -> None:
        for name, param in self.engine.module.named_parameters():
            if name in self.trained:
                wanted = self.trained[name].grad
                wanted = torch.zeros_like(self.trained[name]) if wanted is None else wanted
                found = safe_get_full_grad(param)
                self.note("gradient", math.inf if found is None else scaled_error(found, wanted))

    def update(self) -> None:
        """Clip to ``CLIP`` and update both."""
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), CLIP))
        self.optimizer.step()  # type: ignore[union-attr]
        self.engine.step()
        self.note("norm", abs(self.engine.get_global_grad_norm() / norm - 1))

    def parameters(self) -> None:
        for name, param in self.engine.module.named_parameters():
            if name in self.trained:
                self.note("parameter", scaled_error(safe_get_full_fp32_param(param), self.trained[name].detach()))
