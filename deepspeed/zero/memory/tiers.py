"""Where states rest besides the device: host memory, page-locked where that helps, and drives."""

import contextlib

import torch

from deepspeed.errors import UsageError, counted
from deepspeed.tier.arena import ALIGN, Arena
from deepspeed.tier.drive import Drive, Stored
from deepspeed.tier.staging import Staging
from deepspeed.tier.store import TierStore
from deepspeed.zero.memory.fit import MemoryPlan
from deepspeed.zero.plan import InFlight, OffloadPlan, StateKind, Tier, UnitPlan


class Tiers:
    """Places for shards. Drives are opened when the first state comes to rest there. ``arena``: the host memory behind
    all that rests there or passes through; it keeps what is given back for the next user if ``keep``.
    """

    def __init__(self, plan: OffloadPlan, device: torch.device, *, keep: bool = True) -> None:
        self.plan = plan
        self.device = device
        self.arena = Arena(pins=device.type != "cpu", keep=keep)
        self._drives: dict[str, Drive] = {}
        self._grad_staging: Staging | None = None
        self._host_param_left = plan.host_param_numel

    def place(self, kind: StateKind, tier: Tier, numel: int, dtype: torch.dtype) -> TierStore | None:
        """Return a place for a state on ``tier``; None: the device. ``max_in_cpu`` parameters stay in host memory."""
        if tier is Tier.NVME:
            if kind is StateKind.GRAD:
                few = InFlight.GRADIENT_BUFFERS
                self._grad_staging = self._grad_staging or Staging(few, arena=self.arena, pin=self.plan.pin_optim)
                return Stored(self.optim_drive(), numel, dtype, staging=self._grad_staging)
            if kind is StateKind.OPTIM:
                return Stored(self.optim_drive(), numel, dtype)
            drive = self._param_drive(dtype.itemsize)  # a wrong folder is an error also when nothing goes there yet
            if numel > self._host_param_left:
                return Stored(drive, numel, dtype)
            self._host_param_left -= numel
        # a master that is updated while its parameter is in use is not the parameter
        alone = kind is StateKind.OPTIM and self.plan.update.masters_apart
        if tier is Tier.DEVICE or (self.device.type == "cpu" and not alone):
            return None
        pin = self.plan.pin_param if kind is StateKind.PARAM else self.plan.pin_optim
        return TierStore(self.arena.empty(numel, dtype=dtype, pin=pin))

    def open(self, rows: list[UnitPlan], memory: MemoryPlan, *, width: int) -> Exception | None:
        """Open the drives that ``rows`` need; return the error, or None. ``width``: bytes of a parameter element."""
        slack = len(rows) * 16 * ALIGN  # regions end with pages
        param = sum(line.drive for line in memory.lines if line.what == "parameters")
        try:
            if any(row.param.tier is Tier.NVME for row in rows):
                self._param_drive(width).expect(param + slack)
            if any(row.optim is not None and row.optim.tier is Tier.NVME for row in rows):
                self.optim_drive().expect(memory.drive - param + slack)
        except (UsageError, OSError) as error:
            self.close()
            return error
        return None

    def optim_drive(self) -> Drive:
        """Return the drive behind ``offload_optimizer``, opened on the first call."""
        plan = self.plan
        return self._open("optimizer", plan.optim_folder, plan.optim_buffers, plan.tile_numel * 4, pin=plan.pin_optim)

    def _param_drive(self, width: int) -> Drive:
        plan, piece = self.plan, self.plan.param_piece_numel * width
        return self._open("param", plan.param_folder, plan.param_buffers, piece, pin=plan.pin_param)

    def _open(self, state: str, folder: str, staging: int, piece_bytes: int, *, pin: bool) -> Drive:
        if state not in self._drives:
            plan, label = self.plan, f"zero_optimization.offload_{state}.nvme_path"
            engine = {"block_bytes": plan.block_bytes, "queue_depth": plan.queue_depth, "threads": plan.threads}
            self._drives[state] = Drive(
                folder, label=label, staging=staging, piece_bytes=piece_bytes, pin=pin, arena=self.arena, **engine
            )
        return self._drives[state]

    @property
    def drives(self) -> list[Drive]:
        return list(self._drives.values())

    def describe(self) -> list[str]:
        """Describe each place in use by a clause for the log."""
        plan, clauses = self.plan, []
        for state, drive in self._drives.items():
            param, optim = (plan.param_buffers, plan.param_piece_numel), (plan.optim_buffers, plan.tile_numel)
            buffers, window = param if state == "param" else optim
            way = "O_DIRECT" if drive.direct else "page cache"
            how = f"{drive.backend}, {way}, {plan.block_bytes} bytes x {plan.queue_depth}"
            how += f", {counted(plan.threads, 'thread')}; {buffers} buffers of at most {window:,} elements"
            clauses.append(f"offload_{state} on {drive.folder} ({how})")
        effect = "" if self.device.type != "cpu" else " (no effect: the device is the host)"
        for kind, nbytes, note in (("host", plan.host_limit, ""), ("device", plan.device_limit, effect)):
            if nbytes:
                clauses.append(f"memory.{kind}_limit {nbytes / 2**20:,.0f} MiB{note}")
        if policy := plan.update.describe():
            clauses.append(policy)
        pinned = [state for state, pin in (("parameters", plan.pin_param), ("optimizer state", plan.pin_optim)) if pin]
        return [*clauses, f"page-locked memory for {' and '.join(pinned) or 'nothing'}{effect}"]

    def close(self, *, params: bool = True) -> None:
        """Free host memory and drive space, and the states there. Without ``params`` parameters on a drive stay."""
        for state in [state for state in self._drives if params or state != "param"]:
            self._drives.pop(state).close()
        for staging in [self._grad_staging, *(drive.staging for drive in self._drives.values())]:
            with contextlib.suppress(OSError):  # of a failed write, which its own waiters hear of
                if staging is not None:
                    staging.clear()
        self.arena.close()
