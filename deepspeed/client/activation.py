"""Activation checkpointing under the names of ``deepspeed.checkpointing``, on top of ``torch.utils.checkpoint``.

A checkpointed function keeps only its inputs; backward runs it again, with the random states of the first run, to get
its intermediate values (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
"""

import contextlib
import functools
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from deepspeed.accelerator.device import get_accelerator
from deepspeed.config.parse import read_config_source
from deepspeed.errors import UsageError
from deepspeed.monitor.log import logger, warning_once
from deepspeed.sequence.offload import OffloadActivations, get_checkpoint_hidden_states_offloading_ctx_manager

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
# Distance between the default seed and the first tensor-parallel seed, as Megatron-style scripts expect it.
_SEED_OFFSET = 2718

# Argument of configure -> key of the ``activation_checkpointing`` block.
_CONFIG_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}


class _Settings(types.SimpleNamespace):
    """Settings of ``configure``: its arguments, ``mpu``, and whether it was called."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"mpu": None, "configured": False, **dict.fromkeys(_CONFIG_KEYS), **values})


class RNGStatesTracker:
    """Named random streams: code inside ``fork(name)`` draws from that stream and leaves the default one untouched.

    Tensor-parallel code needs randomness that is equal on all ranks (default stream) and one that differs between them
    (``model-parallel-rng``). ``states_`` are generator states of the current device, or the CPU's where there is none.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all streams."""
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the state of every stream, for ``set_states``."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all streams by ``states``."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start the stream ``name`` from ``seed``; UsageError when the name or the seed is taken."""
        if name in self.states_:
            raise UsageError(f"The random stream {name!r} exists already; reset() the tracker first.")
        if seed in self.seeds_:
            raise UsageError(f"Seed {seed} belongs to another random stream already, which draws the same numbers.")
        self.seeds_.add(seed)
        self.states_[name] = torch.empty(0)
        with self.fork(name, seed=seed):
            pass

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME, *, seed: int | None = None) -> Iterator[None]:
        """Draw from stream ``name`` inside, anew from a ``seed``; UsageError when it was never added."""
        if name not in self.states_:
            raise UsageError(
                f"There is no random stream {name!r}; add it, or call model_parallel_cuda_manual_seed(seed), first."
            )
        accelerator = get_accelerator()
        default = accelerator.get_rng_state()
        if seed is None:
            accelerator.set_rng_state(self.states_[name])
        else:
            accelerator.manual_seed(seed)
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(default)


# The public interface is a module of functions (``deepspeed.checkpointing.configure(...)``, then ``checkpoint(fn, x)``
# from inside any model), so there is no object that could carry the settings and the random streams: one holder of each
# lives here. Engines neither read nor write them.
_settings = _Settings()
_CUDA_RNG_STATE_TRACKER = RNGStatesTracker()


def _replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function``: recomputations draw from the named streams as the first run did; torch forgets those."""
    first: list[dict[str, torch.Tensor]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        now = _CUDA_RNG_STATE_TRACKER.get_states()
        if not first:
            first.append(now)
            return function(*args, **kwargs)
        _CUDA_RNG_STATE_TRACKER.set_states(first[0])
        try:
            return function(*args, **kwargs)
        finally:
            _CUDA_RNG_STATE_TRACKER.set_states(now)

    return run


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)``, keeping only the inputs until backward.

    The non-reentrant kind is used with a keyword argument that needs a gradient, and without a tensor among ``args``
    that does, because the reentrant one would silently give the former, or the parameters, no gradient.
    """
    by_name = any(isinstance(value, torch.Tensor) and value.requires_grad for value in kwargs.values())
    reentrant = not by_name and any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
    return _run(function, args, kwargs, reentrant=reentrant)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``checkpoint`` without an inner backward pass: recomputation happens when a saved value is asked for."""
    return _run(function, args, {}, reentrant=False)


@functools.cache
def _offloading() -> OffloadActivations:
    """Return the one context of all checkpointed functions, as the backward of one fetches for that of the previous."""
    return get_checkpoint_hidden_states_offloading_ctx_manager()


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, reentrant: bool) -> Any:
    bound = functools.partial(function, **kwargs) if kwargs else function
    # Streams can only differ when somebody added one.
    replayed = _replayed(bound) if _CUDA_RNG_STATE_TRACKER.states_ else bound
    accelerator = get_accelerator()
    wait = accelerator.synchronize if _settings.synchronize or _settings.profile else lambda: None
    wait()
    start = time.perf_counter()
    offload = _settings.checkpoint_in_cpu and accelerator.device_name() != "cpu"
    with _offloading() if offload else contextlib.nullcontext():
        result = torch_checkpoint.checkpoint(replayed, *args, use_reentrant=reentrant)
    wait()
    if _settings.profile:
        name = getattr(function, "__qualname__", type(function).__name__)
        logger.info("checkpointed forward of %s: %.3f ms", name, (time.perf_counter() - start) * 1e3)
    return result


def _block(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str | dict):
        config = read_config_source(config)
    of = config.get if isinstance(config, Mapping) else functools.partial(getattr, config)
    block = of("activation_checkpointing", None)
    if isinstance(block, Mapping):
        return block
    return {key: getattr(block, key) for key in _CONFIG_KEYS.values() if hasattr(block, key)}


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
    """Configure ``checkpoint``; arguments win over the ``activation_checkpointing`` block of ``deepspeed_config``.

    ``checkpoint_in_cpu``: saved inputs rest in page-locked host memory. ``synchronize``: wait for the device at each
    boundary. ``profile``: log the forward time of each call. ``partition_activations`` splits over tensor-parallel
    ranks and has no effect in this release. ``contiguous_checkpointing`` needs it and ``num_checkpoints`` (UsageError).
    """
    given, block = locals(), _block(deepspeed_config)
    merged = {name: block.get(key) if given[name] is None else given[name] for name, key in _CONFIG_KEYS.items()}
    changes = {name: value for name, value in merged.items() if value is not None}
    settings = _Settings(**{**vars(_settings), "mpu": mpu_, "configured": True, **changes})
    if settings.partition_activations and mpu_ is not None and not hasattr(mpu_, "get_model_parallel_rank"):
        raise UsageError("partition_activations: mpu_ has no get_model_parallel_rank(); pass an mpu that has it.")
    if settings.contiguous_checkpointing and not settings.partition_activations:
        raise UsageError("contiguous_checkpointing works on partitioned activations; set partition_activations too.")
    if settings.contiguous_checkpointing and not settings.num_checkpoints:
        raise UsageError("contiguous_checkpointing needs num_checkpoints, the number of checkpoints of a forward pass.")
    vars(_settings).update(vars(settings))
    partition_activations_in_checkpoint(settings.partition_activations)


def is_configured() -> bool:
    """Tell whether ``configure`` was called."""
    return _settings.configured


def reset() -> None:
    """Drop buffers of packed activations. This release keeps none between iterations."""


def set_num_layers(nlayers: int) -> None:
    """Set the number of checkpointed layers in one forward pass."""
    _settings.num_checkpoints = nlayers


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Change ``partition_activations`` alone."""
    _settings.partition_activations = partition_activation
    if partition_activation:
        warning_once("partition_activations has no effect: there are no tensor-parallel ranks to split over.")


def get_cuda_rng_tracker() -> RNGStatesTracker:
    """Return the tracker of the named random streams (of whatever device this process uses)."""
    return _CUDA_RNG_STATE_TRACKER


def _add_parallel_stream(seed: int) -> None:
    names = ("get_tensor_model_parallel_rank", "get_model_parallel_rank")
    rank = next((getattr(_settings.mpu, name) for name in names if hasattr(_settings.mpu, name)), lambda: 0)
    _CUDA_RNG_STATE_TRACKER.reset()
    _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + _SEED_OFFSET + rank())


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default stream, and ``model-parallel-rng`` by ``seed + 2718 + tensor-parallel rank``; drop others."""
    get_accelerator().manual_seed(seed)
    _add_parallel_stream(seed)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Restart only the ``model-parallel-rng`` stream, from ``seed + 2718 + tensor-parallel rank``."""
    states = _CUDA_RNG_STATE_TRACKER.get_states()
    _add_parallel_stream(seed)
    _CUDA_RNG_STATE_TRACKER.set_states(states | _CUDA_RNG_STATE_TRACKER.get_states())


def _set_cuda_rng_state(new_state: torch.Tensor, device: int | str | torch.device = -1) -> None:
    """Restore a generator state; -1 is the current device."""
    get_accelerator().set_rng_state(new_state, None if device == -1 else device)
