"""Names of tensor-parallel layers. Nothing replaces layers in this release, so there is nothing to gather."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from deepspeed.pending import pending_class

LinearLayer = pending_class("deepspeed.module_inject.layers.LinearLayer")
LinearAllreduce = pending_class("deepspeed.module_inject.layers.LinearAllreduce")


class GatherReplacedLayerParams:
    """Context with the full weights of tensor-parallel layers; without such layers it does nothing."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter] | torch.nn.Parameter, module: torch.nn.Module, enabled: bool = True
    ) -> None:
        self.params, self.module, self.enabled = params, module, enabled

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        return None


def is_autotp_training_mode() -> bool:
    """False: there is no tensor parallelism in this release."""
    return False
