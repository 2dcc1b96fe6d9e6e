"""Which columns the device updates at every step, and when the host updates the rest: the block ``zenflow``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import OptimizerConfigError
from deepspeed.optim.rules import AdamBase
from deepspeed.zero.plan import Bytes, Tier, UpdateSettings
from deepspeed.zero.update.selective.columns import most_chosen, width_of


@dataclass(frozen=True)
class ColumnsPlan(UpdateSettings):
    """Settings of ``zenflow``. ``ratio``: share of columns. ``select``: steps between choices, 0: every fourth window.

    ``window``: steps of one, 0 for as many as ``auto_ratio`` says. ``overlap``: the host's update goes on beside the
    next window. ``warm_up``: first steps that update everything. ``cores``: the share of them that the update takes.
    """

    ratio: float
    select: int = 0
    window: int = 0
    overlap: bool = False
    auto_ratio: float = 0.99
    warm_up: int = 0
    cores: float = 1.0
    masters_apart = True

    @property
    def gradient_copies(self) -> int:
        return 2 if self.overlap else 1

    def check(self, optimizer: Any, mesh: Any) -> None:
        if not isinstance(optimizer, AdamBase):
            raise OptimizerConfigError(
                f"zero_optimization.zenflow needs this package's AdamW or Adam, not {type(optimizer).__name__}; remove "
                "it, or use one of these by name in the configuration"
            )
        if mesh.pp.size > 1 or mesh.tp.size > 1:
            raise OptimizerConfigError(
                "zero_optimization.zenflow cannot be combined with pipeline or tensor parallelism, whose ranks have "
                "parts of columns; remove it, or use offload_optimizer.delayed_update"
            )

    def memory_of(
        self, shapes: Sequence[tuple[int, tuple[int, ...]]], numel: int, *, parts: int, slots: int, shared: bool
    ) -> list[Bytes]:
        """Implement ``UpdateSettings.memory_of``: sums of a window; of the chosen columns weights, slots and gradient;
        their numbers, on both sides, and the squares of all columns; and a byte for each element, which marks the
        chosen ones while the states are at home.
        """
        chosen, columns = most_chosen(shapes, numel * parts, parts=parts, ratio=self.ratio)
        compared = sum(width_of(shape) for _, shape in shapes if len(shape) > 1)
        sums = Bytes("sums of gradients of a window", Tier.HOST, 4 * numel)  # the host alone works with them
        return [
            *[sums] * (1 + self.overlap),
            Bytes("states of chosen columns", Tier.DEVICE, chosen * (8 + slots)),
            Bytes("choice of columns", Tier.DEVICE, 8 * columns + 4 * compared),
            Bytes("choice of columns", Tier.HOST, numel + (0 if shared else 8 * columns)),
        ]

    def describe(self) -> str:
        when = f"every {self.select} steps" if self.select else "every 4th window"
        rest = f"in windows of {self.window}" if self.window else "in windows of 4 to 16"
        if not self.window:
            rest += f", longer while they have less than {1 - self.auto_ratio:.0%} of the squares"
        beside = f", beside the next on {self.cores:.0%} of the cores" if self.overlap else ""
        begin = f", after {self.warm_up} steps of everything" if self.warm_up else ""
        return f"{self.ratio:.0%} of the columns on the device, chosen {when}; others {rest}{beside}{begin}"


def settings_of(config: DeepSpeedConfig) -> ColumnsPlan | None:
    """Return the settings, where the configuration asks for them, or None."""
    block = config.zero.zenflow
    if block is None:
        return None
    select = 0 if block.select_interval == "auto" else int(block.select_interval)
    return ColumnsPlan(
        ratio=float(block.topk_ratio),
        select=select * (int(block.steps_per_epoch or 1) if block.select_strategy == "epoch" else 1),
        window=0 if block.update_interval == "auto" else int(block.update_interval),
        overlap=block.overlap_step,
        auto_ratio=float(block.auto_ratio),
        warm_up=int(block.full_warm_up_rounds),
        cores=1.0 - float(block.pt_reserved_cores_perc) if block.overlap_step else 1.0,
    )
