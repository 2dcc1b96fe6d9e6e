"""From the configuration to rows of one table. The only file besides the config that knows the word "stage".

ZeRO (Rajbhandari et al. 2020) as data: each of a unit's three states has a rest *spread* per mesh axis and a *tier*.
Everything below reads these rows; nothing else branches on a stage.
"""

from dataclasses import dataclass, replace
from enum import Enum

from deepspeed.config import DeepSpeedConfig, OffloadOptimizerConfig, OffloadParamConfig, ZenFlowConfig


class InFlight:
    """What is in memory at most beside the states at rest: the runtime keeps to it, and the memory plan counts it."""

    REDUCTIONS = 2
    UNITS = 2  # typical ones, gathered before they are needed
    READS = 3  # shards on their way from a drive beside the ones being fetched
    GRADIENT_BUFFERS = 3  # one filled by a reduction while two are written
    EARLY = 3  # of the elements that the host updates, one in so many has a place for new states beside the old ones
    VISITS = 2  # units whose optimizer states are on the device for their update: one comes while one goes


class StateKind(Enum):
    """The three model states."""

    PARAM = "param"
    GRAD = "grad"
    OPTIM = "optim"


class Spread(Enum):
    """How a state rests on one mesh axis (PARTIAL exists only in passing, for gradients)."""

    REPLICATED = "R"
    SHARDED = "S"


class Tier(Enum):
    """Where a state rests."""

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
        """Whether it rests elsewhere than on the device."""
        return self.tier is not Tier.DEVICE


@dataclass(frozen=True)
class UnitPlan:
    """One row: the rest places of a unit's states. Frozen parameters have no GRAD and no OPTIM.

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
        """Whether every rank keeps the whole reduced gradient on its device."""
        return self.grad is not None and not self.grad.sharded and not self.grad.away

    @property
    def wider(self) -> bool:
        """Whether OPTIM is spread over more ranks than PARAM, which a part of them holds together (hpZ of ZeRO++)."""
        return self.param.sharded and self.optim is not None and self.optim.spread != self.param.spread

    @property
    def visits(self) -> bool:
        """Whether OPTIM travels to the device for its update: the gradient waits for it there."""
        return self.grad is not None and self.optim is not None and self.optim.away and not self.grad.away

    def of(self, kind: StateKind) -> StatePlan:
        """The rest place of a state that the unit has."""
        state: StatePlan | None = getattr(self, kind.value)
        assert state is not None, f"there is no {kind.value}"
        return state

    def over(self, axes: int) -> "UnitPlan":
        """The same row on a mesh of ``axes`` axes: on those that it does not know all states are whole."""
        more = (Spread.REPLICATED,) * (axes - len(self.param.spread))
        states = {kind.value: getattr(self, kind.value) for kind in StateKind}
        return replace(self, **{k: replace(s, spread=s.spread + more) for k, s in states.items() if s is not None})

    def updated_on_device(self, *, travels: bool) -> "UnitPlan":
        """The row with the gradient on the device, and OPTIM there, too, unless it ``travels`` there."""
        assert self.grad is not None and self.optim is not None
        optim = self.optim if travels else replace(self.optim, tier=Tier.DEVICE)
        return replace(self, grad=replace(self.grad, tier=Tier.DEVICE), optim=optim)

    def frozen(self) -> "UnitPlan":
        return replace(self, grad=None, optim=None)


@dataclass(frozen=True)
class ColumnsPlan:
    """Which columns the device updates at every step, and when the host updates the rest (``zero/update/zenflow.py``).

    ``ratio``: the share of columns. ``select``: steps after which they are chosen again, 0 for every fourth window.
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


@dataclass(frozen=True)
class OffloadPlan:
    """Places and sizes (in elements, of one rank) behind the tiers of a plan.

    ``tile_numel`` bounds what of OPTIM is in memory at once when it rests on a drive, ``host_param_numel`` how much of
    PARAM stays in host memory before the drive is used, ``device_share`` how much of OPTIM the device updates (None: as
    the rates of this machine say); it stays there, or with ``travel`` comes for the update. ``delayed_from``: the first
    update, from 1, that goes on beside the next step; 0 for none. ``columns``: the device updates some at once, the
    host the rest later. ``early``: updates begin beside the backward, on the share ``host_cores`` of the cores. Limits
    are bytes; 0 for none. ``save_copies``: saves
    keep a copy of the states in host memory while training goes on.
    """

    param_folder: str = ""
    param_buffers: int = 5
    param_piece_numel: int = 100_000_000
    host_param_numel: int = 0
    optim_folder: str = ""
    optim_buffers: int = 8
    tile_numel: int = 1 << 21
    device_share: float | None = 0.0
    travel: bool = False
    delayed_from: int = 0
    columns: ColumnsPlan | None = None
    early: bool = False
    host_cores: float = 1.0
    pin_param: bool = True
    pin_optim: bool = True
    block_bytes: int = 1 << 20
    queue_depth: int = 32
    threads: int = 1
    host_limit: int = 0
    device_limit: int = 0
    save_copies: bool = False

    @property
    def apart(self) -> bool:
        """Whether masters in host memory change while their parameters are in use, and so are never these."""
        return self.delayed_from > 0 or self.columns is not None


@dataclass(frozen=True)
class ZeroPlan:
    """The table of one engine, and the sizes (in elements) that shape units and windows."""

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


def make_plan(config: DeepSpeedConfig, world_size: int) -> ZeroPlan:
    """Turn the zero block of ``config`` into the table for ``world_size`` data-parallel ranks."""
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
        offload=_offload(config),
    )


_LEAST_PIECE = 4096  # elements: what travels to a drive is at least a few pages


def _offload(config: DeepSpeedConfig) -> OffloadPlan:
    zero, aio = config.zero, config.aio
    param, optim = zero.offload_param or OffloadParamConfig(), zero.offload_optimizer or OffloadOptimizerConfig()
    default, travel = OffloadPlan(), optim.device_states == "travel"
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
        device_share=None if travel and "ratio" not in optim.model_fields_set else 1.0 - float(optim.ratio),
        travel=travel,
        delayed_from=1 + int(optim.delayed_update_warm_up) if optim.delayed_update else 0,
        columns=_columns(zero.zenflow),
        early=optim.super_offload,
        host_cores=float(optim.cpuadam_cores_perc) if optim.super_offload else 1.0,
        pin_param=param.pin_memory,
        pin_optim=optim.pin_memory,
        block_bytes=-(-int(aio.block_size) // 4096) * 4096,
        queue_depth=int(aio.queue_depth) if depth_chosen else default.queue_depth,
        threads=int(aio.intra_op_parallelism),
        host_limit=config.memory.host_limit or 0,
        device_limit=config.memory.device_limit or 0,
        save_copies=config.checkpoint.in_background,
    )


def _columns(block: ZenFlowConfig | None) -> ColumnsPlan | None:
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
