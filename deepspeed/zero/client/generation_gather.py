"""Generation with whole parameters and no hooks in the way."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from deepspeed.zero.client.safe_state import GatheredParameters


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The module of an engine with every parameter gathered once and ZeRO's hooks taken off. Collective at both ends.

    Inside, ranks may run different numbers of forward passes. ``model`` that is no engine is handed back as it is.
    """
    offload = getattr(model, "_offload", None)
    if offload is None:
        yield model
        return
    with GatheredParameters(list(model.module.parameters())):
        offload.suspend()
        try:
            yield model.module
        finally:
            offload.resume()
