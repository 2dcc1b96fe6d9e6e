"""From the configuration to rows of one table. The only file besides the config that knows the word "stage".

ZeRO (Rajbhandari et al. 2020) as data: each of a unit's three states has a rest *spread* per mesh axis and a *tier*.
Everything below reads these rows; nothing else branches on a stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from deepspeed.config import DeepSpeedConfig, OffloadOptimizerConfig, OffloadParamConfig


class InFlight:
    """Limits of memory beside the states at rest: the runtime keeps to them, and the memory plan counts them."""

    REDUCTIONS = 2
    UNITS = 2  # typical ones, gathered before they are needed
    READS = 3  # shards on their way from a drive beside the ones being fetched
    GRADIENT_BUFFERS = 3  # one filled by a reduction while two are written
    LOADED = 2  # units whose optimizer states are on the device for their update: one comes while one goes


class StateKind(Enum):
    """Kinds of model state: parameters, gradients, optimizer state."""

    PARAM = "param"
    GRAD = "grad"
    OPTIM = "optim"


class Spread(Enum):
    """Spread of a resting state over one mesh axis (PARTIAL exists only in passing, for gradients)."""

    REPLICATED = "R"
    SHARDED = "S"


class Tier(Enum):
    """Tier on which a state rests: memory of the device or the host, or a drive."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}  # as the configuration names them
Spreads = tuple[Spread, ...]


@dataclass(frozen=True)
class StatePlan:
    """Rest place of one state: one spread per mesh axis (inner first) and a tier."""

    spread: Spreads
    tier: Tier = Tier.DEVICE

    @property
    def sharded(self) -> bool:
        return Spread.SHARDED in self.spread

    @property
    def away(self) -> bool:
        """Tell whether the state rests elsewhere than on the device."""
        return self.tier is not Tier.DEVICE


@dataclass(frozen=True)
class UnitPlan:
    """Row of the table: the rest places of a unit's states. Frozen parameters have no GRAD and no OPTIM.

    ``reduce_each_backward`` False keeps gradients PARTIAL (local sums) until the accumulation boundary.
    """

    param: StatePlan
    grad: StatePlan | None
    optim: StatePlan | None
    reduce_each_backward: bool = True

    def __post_init__(self) -> None:
        assert (self.grad is None) == (self.optim is None), "gradients and optimizer state come and go together"
        if self.optim is not None:
            pairs = [*zip(self.param.spread, self.optim.spread, strict=True)]
            assert (Spread.SHARDED, Spread.REPLICATED) not in pairs, "sharded parameters need sharded optimizer state"

    @property
    def gradient_whole(self) -> bool:
        """Tell whether every rank keeps the whole reduced gradient on its device."""
        return self.grad is not None and not self.grad.sharded and not self.grad.away

    @property
    def wider(self) -> bool:
        """Tell whether OPTIM is sharded over more ranks than PARAM (hpZ of ZeRO++)."""
        return self.param.sharded and self.optim is not None and self.optim.spread != self.param.spread

    @property
    def loads_states(self) -> bool:
        """Tell whether OPTIM is loaded to the device for its update: the gradient waits for it there."""
        return self.grad is not None and self.optim is not None and self.optim.away and not self.grad.away

    def of(self, kind: StateKind) -> StatePlan:
        """Return the rest place of a state that the unit has."""
        state: StatePlan | None = getattr(self, kind.value)
        assert state is not None, f"there is no {kind.value}"
        return state

    def over(self, axes: int) -> "UnitPlan":
        """Return the row for a mesh of ``axes`` axes, with all states replicated on the added ones."""
        more = (Spread.REPLICATED,) * (axes - len(self.param.spread))
        states = {kind.value: getattr(self, kind.value) for kind in StateKind}
        return replace(self, **{k: replace(s, spread=s.spread + more) for k, s in states.items() if s is not None})

    def updated_on_device(self, *, loads: bool) -> "UnitPlan":
        """Return the row with the gradient on the device, and OPTIM too, unless each update ``loads`` it."""
        assert self.grad is not None and self.optim is not None
        optim = self.optim if loads else replace(self.optim, tier=Tier.DEVICE)
        return replace(self, grad=replace(self.grad, tier=Tier.DEVICE), optim=optim)

    def frozen(self) -> "UnitPlan":
        return replace(self, grad=None, optim=None)


class Bytes(NamedTuple):
    """Bytes of one rank that an update policy needs; ``paged``: in the arena of host memory, in whole pages."""

    what: str
    tier: Tier
    nbytes: int
    paged: bool = False


@dataclass(frozen=True)
class UpdateSettings:
    """Settings by which an update policy shapes the plan before anything is built; these are for updates at once.

    A policy's own settings are a subclass beside it (``zero/update``), made from the configuration by its registry.
    """

    masters_apart: ClassVar[bool] = False  # masters on the host change while their parameters are in use
    loads_states: ClassVar[bool] = False  # a unit's states are loaded to the device where that updates them

    @property
    def gradient_copies(self) -> int:
        """Return the number of rest gradients of a unit in host memory at once."""
        return 1

    def check(self, optimizer: Any, mesh: Any) -> None:
        """Raise OptimizerConfigError for what this policy cannot be combined with."""

    def device_share(self, stated: float, optimizer: Any, mesh: Any, device: Any) -> float:
        """Return the device's share of the update; ``stated``: by ``offload_optimizer.ratio``. Collective."""
        return stated

    def memory_of(
        self, shapes: Sequence[tuple[int, tuple[int, ...]]], numel: int, *, parts: int, slots: int, shared: bool
    ) -> list[Bytes]:
        """Return bytes for a unit whose OPTIM is in host memory, in ``parts`` of ``numel`` elements. ``shapes``: offset
        and shape of its parameters; ``slots``: bytes of slots an element; ``shared``: the device is the host.
        """
        return []

    def memory_beside(self, numels: Sequence[int], *, slots: int) -> list[Bytes]:
        """Return bytes for all such units together; ``numels``: one rank's elements of each."""
        return []

    def describe(self) -> str:
        """Return a clause for the log, or ""."""
        return ""


AT_ONCE = UpdateSettings()
_ROUNDING = 1e-9  # of a share, which is a difference of two decimal numbers


def every_so_many(numels: Sequence[int], share: float) -> list[bool]:
    """Return for each unit, in the order of the update, whether the device updates it: as soon as the device then has
    no more than ``share`` of the elements so far. Of equal units with a share of 1/k every k-th, so that device and
    host work at the same time from the first unit of the update to the last (Maurya et al. 2024).
    """
    chosen, total, taken = [], 0, 0
    for numel in numels:
        total += numel
        chosen.append(taken + numel <= share * total * (1 + _ROUNDING))
        taken += numel if chosen[-1] else 0
    return chosen


@dataclass(frozen=True)
class OffloadPlan:
    """Places and sizes (in elements, of one rank) behind the tiers of a plan.

    ``tile_numel``: most elements of OPTIM in memory at once when it rests on a drive. ``host_param_numel``: elements of
    PARAM that stay in host memory before the drive is used. ``device_share``: share of OPTIM that the device updates.
    ``update``: settings of the update policy. Limits are bytes; 0 for none. ``save_copies``: saves keep a copy of the
    states in host memory while training goes on.
    """

    param_folder: str = ""
    param_buffers: int = 5
    param_piece_numel: int = 100_000_000
    host_param_numel: int = 0
    optim_folder: str = ""
    optim_buffers: int = 8
    tile_numel: int = 1 << 21
    device_share: float = 0.0
    update: UpdateSettings = AT_ONCE
    pin_param: bool = True
    pin_optim: bool = True
    block_bytes: int = 1 << 20
    queue_depth: int = 32
    threads: int = 1
    host_limit: int = 0
    device_limit: int = 0
    save_copies: bool = False


@dataclass(frozen=True)
class ZeroPlan:
    """Table of one engine, and the sizes (in elements) that shape units and windows."""

    regular: UnitPlan
    persistent: UnitPlan
    inner_size: int | None
    pack_numel: int
    persistence_numel: int
    model_persistence_numel: int
    prefetch_numel: int
    reuse_numel: int
    live_numel: int
    overlap: bool
    divergence: str
    reducing: bool = False  # sums of gradients have a communicator of their own
    watch: bool = True  # after an overflow the log names who produced it
    offload: OffloadPlan = OffloadPlan()

    def row(self, *, trainable: bool, persistent: bool) -> UnitPlan:
        plan = self.persistent if persistent else self.regular
        return plan if trainable else plan.frozen()


def make_plan(config: DeepSpeedConfig, world_size: int, update: UpdateSettings = AT_ONCE) -> ZeroPlan:
    """Turn the zero block of ``config`` into the table for ``world_size`` data-parallel ranks; ``update``: settings of
    the update policy.
    """
    zero = config.zero
    stage = zero.stage
    mics, hpz = zero.mics_shard_size, zero.zero_hpz_partition_size
    inner = mics if 0 < mics < world_size else hpz if 1 < hpz < world_size else None
    inner = inner if stage == 3 else None
    axes = 1 if inner is None else 2
    replicated = (Spread.REPLICATED,) * axes
    inner_only = (Spread.SHARDED, Spread.REPLICATED)[:axes]
    everywhere = inner_only if inner is not None and inner == mics else (Spread.SHARDED,) * axes
    rest = everywhere if stage >= 1 else replicated
    param_tier = TIERS[zero.param_tier.value]
    optim_tier = Tier.DEVICE if zero.offload_optimizer is None else TIERS[zero.offload_optimizer.device.value]
    # Gradients wait where the update will read them: in host memory.
    grad_tier = Tier.HOST if optim_tier is not Tier.DEVICE else Tier.DEVICE
    param = StatePlan(inner_only if stage == 3 else replicated, param_tier)
    regular = UnitPlan(param, StatePlan(rest, grad_tier), StatePlan(rest, optim_tier), reduce_each_backward=stage >= 2)
    chosen = zero.model_fields_set
    return ZeroPlan(
        regular=regular,
        persistent=replace(regular, param=StatePlan(replicated)),
        inner_size=inner,
        pack_numel=int(zero.reduce_bucket_size),
        persistence_numel=int(zero.param_persistence_threshold) if stage == 3 else 0,
        model_persistence_numel=int(zero.model_persistence_threshold),
        prefetch_numel=int(zero.prefetch_bucket_size),
        # The field's default (1e9) keeps whole small models gathered; memory comes first unless the user asks.
        reuse_numel=int(zero.max_reuse_distance) if "max_reuse_distance" in chosen else 0,
        live_numel=int(zero.max_live_parameters),
        overlap=zero.overlap_comm is not False,
        divergence=zero.divergence,
        reducing=zero.separate_reduce_group and stage == 3,
        watch=zero.compute_grad_norm,
        offload=_offload(config, update),
    )


_LEAST_PIECE = 4096  # elements: what travels to a drive is at least a few pages


def _offload(config: DeepSpeedConfig, update: UpdateSettings) -> OffloadPlan:
    zero, aio = config.zero, config.aio
    param, optim = zero.offload_param or OffloadParamConfig(), zero.offload_optimizer or OffloadOptimizerConfig()
    default = OffloadPlan()
    tile_chosen, depth_chosen = "sub_group_size" in zero.model_fields_set, "queue_depth" in aio.model_fields_set
    buffers_chosen = "buffer_count" in optim.model_fields_set
    return OffloadPlan(
        param_folder=param.nvme_path or "",
        param_buffers=max(1, int(param.buffer_count)),
        param_piece_numel=max(_LEAST_PIECE, int(param.buffer_size)),
        host_param_numel=int(param.max_in_cpu),
        optim_folder=optim.nvme_path or "",
        # The field's default is for whole parameters; tiles also fill them during the backward, and empty them after.
        optim_buffers=max(1, int(optim.buffer_count)) if buffers_chosen else default.optim_buffers,
        # The field's default (1e9) would hold whole small models; a window of a few megabytes feeds any drive.
        tile_numel=max(_LEAST_PIECE, int(zero.sub_group_size)) if tile_chosen else default.tile_numel,
        device_share=1.0 - float(optim.ratio),
        update=update,
        pin_param=param.pin_memory,
        pin_optim=optim.pin_memory,
        block_bytes=-(-int(aio.block_size) // 4096) * 4096,
        queue_depth=int(aio.queue_depth) if depth_chosen else default.queue_depth,
        threads=int(aio.intra_op_parallelism),
        host_limit=config.memory.host_limit or 0,
        device_limit=config.memory.device_limit or 0,
        save_copies=config.checkpoint.in_background,
    )
