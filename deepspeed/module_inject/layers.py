"""The layers of tensor parallelism by the names that clients import, and the values of layers that are in parts."""

from types import TracebackType
from typing import Any

from torch import nn

from deepspeed.client.zero.gathered import GatheredParameters
from deepspeed.tensor.layers import (
    HiddenParallelEmbedding as HiddenParallelEmbedding,
    LinearAllreduce as LinearAllreduce,
    LinearLayer as LinearLayer,
    LmHeadLinearAllreduce as LmHeadLinearAllreduce,
    SubParamLinearAllreduce as SubParamLinearAllreduce,
    SubParamLinearLayer as SubParamLinearLayer,
    TensorParallelLayer as TensorParallelLayer,
    VocabParallelEmbedding as VocabParallelEmbedding,
    VocabParallelLinear as VocabParallelLinear,
)


class GatherReplacedLayerParams:
    """Gather ``params`` (one or several) of tensor-parallel layers whole on every rank, for reading. Collective.

    ``module``: the layer that owns the parameters; with ``enabled`` False the context does nothing.
    """

    def __init__(self, params: Any, module: nn.Module | None = None, enabled: bool = True) -> None:
        self._params = [params] if isinstance(params, nn.Parameter) else list(params)
        alone = enabled and not any(hasattr(param, "_ds_unit") for param in self._params)  # an engine gathers its own
        self._layer = module if alone and isinstance(module, TensorParallelLayer) else None
        self._gathered = GatheredParameters(self._params, enabled=enabled)

    def __enter__(self) -> None:
        self._gathered.__enter__()
        if self._layer is not None:
            self._layer.gather_params(self._params)

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._layer is not None:
            self._layer.cut_now()
        self._gathered.__exit__(kind, raised, trace)


class _Mode:
    """Last value of ``set_autotp_mode``, for clients to read back; layers are the same for training and inference."""

    training = False


def set_autotp_mode(training: bool = False) -> None:
    """Record whether the layers are to be trained; the value has no other effect."""
    _Mode.training = training


def is_autotp_training_mode() -> bool:
    """Return the value that ``set_autotp_mode`` got last."""
    return _Mode.training
