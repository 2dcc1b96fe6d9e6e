"""Names of tensor-parallel layers. Nothing replaces layers in this release, so there is nothing to gather."""

import contextlib
from typing import Any

from deepspeed.errors import pending_class

LinearLayer = pending_class("deepspeed.module_inject.layers.LinearLayer")
LinearAllreduce = pending_class("deepspeed.module_inject.layers.LinearAllreduce")


class GatherReplacedLayerParams(contextlib.nullcontext[None]):
    """Context with the full weights of tensor-parallel layers; without such layers it does nothing."""

    def __init__(self, params: Any, module: Any, enabled: bool = True) -> None:
        super().__init__()


def is_autotp_training_mode() -> bool:
    """False: there is no tensor parallelism in this release."""
    return False
