"""Named random streams: code inside ``fork(name)`` draws from that stream and leaves the default one untouched.

Tensor-parallel code needs two kinds of randomness: equal on all ranks (default stream) and different on each (the
``model-parallel-rng`` stream).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepspeed.device import get_accelerator
from deepspeed.errors import UsageError

MODEL_PARALLEL_RNG = "model-parallel-rng"
# Distance between the default seed and the first tensor-parallel seed, as Megatron-style scripts expect it.
MODEL_PARALLEL_SEED_OFFSET = 2718


class RNGStatesTracker:
    """Generator states of the current device by stream name; works on the CPU's generator where there is no
    accelerator.
    """

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all streams."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """State of every stream, for ``set_states``."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all streams by ``states``."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start the stream ``name`` from ``seed``; UsageError when the name or the seed is taken."""
        if name in self.states_:
            raise UsageError(f"The random stream {name!r} exists already; reset() the tracker first.")
        if seed in self.seeds_:
            raise UsageError(
                f"Seed {seed} belongs to another random stream already; two streams would draw the same numbers."
            )
        self.seeds_.add(seed)
        accelerator = get_accelerator()
        default = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        self.states_[name] = accelerator.get_rng_state()
        accelerator.set_rng_state(default)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw from stream ``name`` inside; UsageError when it was never added."""
        if name not in self.states_:
            raise UsageError(
                f"There is no random stream {name!r}; add it, or call model_parallel_cuda_manual_seed(seed), first."
            )
        accelerator = get_accelerator()
        default = accelerator.get_rng_state()
        accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(default)
