"""Activation checkpointing under the names of ``deepspeed.checkpointing``, on top of ``torch.utils.checkpoint``.

A checkpointed function keeps only its inputs; backward runs it again, with the random states of the first run, to get
its intermediate values (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from deepspeed.activation.rng import MODEL_PARALLEL_RNG, MODEL_PARALLEL_SEED_OFFSET, RNGStatesTracker
from deepspeed.config.parse import read_config_source
from deepspeed.device import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.observe.log import logger

_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL_RNG

# Argument of configure -> key of the ``activation_checkpointing`` block.
_CONFIG_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}
_PARTITION_IS_INERT = (
    "partition_activations has no effect: there are no tensor-parallel ranks to split activations over."
)


@dataclasses.dataclass
class _Settings:
    """What ``configure`` set."""

    mpu: Any = None
    configured: bool = False
    partition_activations: bool = False
    contiguous_checkpointing: bool = False
    num_checkpoints: int | None = None
    checkpoint_in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False
    warned: set[str] = dataclasses.field(default_factory=set)

    def warn_once(self, message: str) -> None:
        """Log ``message`` the first time it comes up."""
        if message not in self.warned:
            self.warned.add(message)
            logger.warning(message)


# The public interface is a module of functions (``deepspeed.checkpointing.configure(...)``, then ``checkpoint(fn, x)``
# from inside any model), so there is no object that could carry the settings and the random streams: one holder of each
# lives here. Engines neither read nor write them.
_settings = _Settings()
_CUDA_RNG_STATE_TRACKER = RNGStatesTracker()


class _ReplayedStreams:
    """``function``, with the named random streams of its first run put back for every later run (the recomputation).

    torch restores only the default generators.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._states: dict[str, torch.Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._states is None:
            self._states = _CUDA_RNG_STATE_TRACKER.get_states()
            return self._function(*args, **kwargs)
        now = _CUDA_RNG_STATE_TRACKER.get_states()
        _CUDA_RNG_STATE_TRACKER.set_states(self._states)
        try:
            return self._function(*args, **kwargs)
        finally:
            _CUDA_RNG_STATE_TRACKER.set_states(now)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


@contextlib.contextmanager
def _boundary(name: str) -> Any:
    """Host offload of saved inputs, device synchronisation and timing around one checkpointed call, as configured."""
    accelerator = get_accelerator()
    if _settings.synchronize or _settings.profile:
        accelerator.synchronize()
    start = time.perf_counter()
    offload = _settings.checkpoint_in_cpu and accelerator.device_name() != "cpu"
    with torch.autograd.graph.save_on_cpu(pin_memory=True) if offload else contextlib.nullcontext():
        yield
    if _settings.synchronize or _settings.profile:
        accelerator.synchronize()
    if _settings.profile:
        logger.info("checkpointed forward of %s: %.3f ms", name, (time.perf_counter() - start) * 1e3)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, keeping only the inputs until backward.

    Keyword arguments must not hold tensors that need a gradient (UsageError). Without a tensor among ``args`` that
    needs one, the non-reentrant kind is used, because the reentrant one would silently give the parameters no gradient.
    """
    needing = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and value.requires_grad]
    if needing:
        raise UsageError(
            f"checkpoint({_name(function)}): the tensor {needing[0]!r} needs a gradient; pass it by position."
        )
    reentrant = any(tensor.requires_grad for tensor in _tensors(args))
    return _run(
        functools.partial(function, **kwargs) if kwargs else function, args, name=_name(function), reentrant=reentrant
    )


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``checkpoint`` without an inner backward pass: recomputation happens when a saved value is asked for."""
    return _run(function, args, name=_name(function), reentrant=False)


def _run(function: Callable[..., Any], args: tuple[Any, ...], *, name: str, reentrant: bool) -> Any:
    # Both kinds give torch an object that is called twice; streams can only differ when somebody added one.
    replayed = _ReplayedStreams(function) if _CUDA_RNG_STATE_TRACKER.states_ else function
    with _boundary(name):
        return torch_checkpoint.checkpoint(replayed, *args, use_reentrant=reentrant)


def _block(deepspeed_config: Any) -> dict[str, Any]:
    if deepspeed_config is None:
        return {}
    if isinstance(deepspeed_config, str | dict):
        deepspeed_config = read_config_source(deepspeed_config)
    if isinstance(deepspeed_config, Mapping):
        return dict(deepspeed_config.get("activation_checkpointing") or {})
    block = getattr(deepspeed_config, "activation_checkpointing", None)
    return {} if block is None else {key: getattr(block, key) for key in _CONFIG_KEYS.values() if hasattr(block, key)}


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Settings for ``checkpoint``; explicit arguments win over the ``activation_checkpointing`` block of
    ``deepspeed_config``.

    ``checkpoint_in_cpu``: saved inputs rest in page-locked host memory. ``synchronize``: wait for the device at each
    boundary. ``profile``: log the forward time of each call. ``partition_activations`` splits over tensor-parallel
    ranks and has no effect in this release. ``contiguous_checkpointing`` needs it and ``num_checkpoints`` (UsageError).
    """
    given = dict(
        partition_activations=partition_activations,
        contiguous_checkpointing=contiguous_checkpointing,
        num_checkpoints=num_checkpoints,
        checkpoint_in_cpu=checkpoint_in_cpu,
        synchronize=synchronize,
        profile=profile,
    )
    block = _block(deepspeed_config)
    merged = {name: given[name] if given[name] is not None else block.get(key) for name, key in _CONFIG_KEYS.items()}
    changes: dict[str, Any] = {name: value for name, value in merged.items() if value is not None}
    _check(dataclasses.replace(_settings, mpu=mpu_, **changes))
    for name, value in {**changes, "mpu": mpu_, "configured": True}.items():
        setattr(_settings, name, value)
    if _settings.partition_activations:
        _settings.warn_once(_PARTITION_IS_INERT)


def _check(settings: _Settings) -> None:
    """Raise UsageError for a combination that cannot work."""
    if (
        settings.partition_activations
        and settings.mpu is not None
        and not hasattr(settings.mpu, "get_model_parallel_rank")
    ):
        raise UsageError(
            "partition_activations: mpu_ has no get_model_parallel_rank(); pass an mpu with model-parallel getters."
        )
    if settings.contiguous_checkpointing and not settings.partition_activations:
        raise UsageError("contiguous_checkpointing works on partitioned activations; set partition_activations too.")
    if settings.contiguous_checkpointing and not settings.num_checkpoints:
        raise UsageError(
            "contiguous_checkpointing needs the number of checkpoints of a forward pass; set num_checkpoints."
        )


def is_configured() -> bool:
    """True once ``configure`` was called."""
    return _settings.configured


def reset() -> None:
    """Drop buffers that packed activations occupied. This release keeps none between iterations, so nothing is left to
    free.
    """


def set_num_layers(nlayers: int) -> None:
    """Number of checkpointed layers in one forward pass."""
    _settings.num_checkpoints = nlayers


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Change ``partition_activations`` alone."""
    _settings.partition_activations = partition_activation
    if partition_activation:
        _settings.warn_once(_PARTITION_IS_INERT)


def get_cuda_rng_tracker() -> RNGStatesTracker:
    """The named random streams (of whatever device this process uses)."""
    return _CUDA_RNG_STATE_TRACKER


def _tp_rank() -> int:
    for getter in ("get_tensor_model_parallel_rank", "get_model_parallel_rank"):
        if hasattr(_settings.mpu, getter):
            return int(getattr(_settings.mpu, getter)())
    return 0


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Default stream: ``seed``; stream ``model-parallel-rng``: ``seed + 2718 + tensor-parallel rank``. Other streams
    are dropped.
    """
    _CUDA_RNG_STATE_TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + MODEL_PARALLEL_SEED_OFFSET + _tp_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Restart only the ``model-parallel-rng`` stream, from ``seed + 2718 + tensor-parallel rank``."""
    states = _CUDA_RNG_STATE_TRACKER.get_states()
    states.pop(_MODEL_PARALLEL_RNG_TRACKER_NAME, None)
    _CUDA_RNG_STATE_TRACKER.reset()
    _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + MODEL_PARALLEL_SEED_OFFSET + _tp_rank())
    _CUDA_RNG_STATE_TRACKER.set_states({**states, **_CUDA_RNG_STATE_TRACKER.get_states()})


def _set_cuda_rng_state(new_state: torch.Tensor, device: int | str | torch.device = -1) -> None:
    """Put a generator state back; -1 is the current device."""
    get_accelerator().set_rng_state(new_state, None if device == -1 else device)
