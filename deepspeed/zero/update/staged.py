"""Optimizer states that rest in page-locked host memory and are staged on the device for their update.

The gradients of these units stay on the device. Their states come on the stream of what goes up, one unit ahead, and
go home behind the update, while the host updates other units (Deep Optimizer States, Maurya et al. 2024).
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm import collectives
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.monitor.log import log_dist
from deepspeed.optim import host as host_kernels
from deepspeed.optim.base import GroupStep, slot_bytes
from deepspeed.optim.host import Scalar
from deepspeed.tier.arena import Arena
from deepspeed.tier.store import Landing
from deepspeed.tier.transfer import ARRIVED, Several, Transfer
from deepspeed.zero.memory.tiers import Tiers
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.param import point
from deepspeed.zero.plan import InFlight, StateKind, UpdateSettings
from deepspeed.zero.update.apply import Groups
from deepspeed.zero.update.inline import InlineUpdate, Part
from deepspeed.zero.update.policy import UpdateHost, UpdatePolicy, require_ours
from deepspeed.zero.update.publish import Publication

_NUMEL = 1 << 22  # of a measurement
_ROUNDS = 4


@dataclass(frozen=True)
class StagedSettings(UpdateSettings):
    """Settings of ``offload_optimizer.device_states`` "travel"; ``measured``: the device's share is not stated."""

    measured: bool
    loads_states = True

    def check(self, optimizer: Any, mesh: Any) -> None:
        require_ours('device_states "travel"', optimizer)

    def device_share(self, stated: float, optimizer: Any, mesh: Any, device: Any) -> float:
        if not self.measured:
            return stated
        share = measured_share(optimizer, mesh, device)
        log_dist(f"of the update {share:.0%} is the device's, as this machine's rates say (offload_optimizer.ratio)")
        return share


def settings_of(config: DeepSpeedConfig) -> StagedSettings | None:
    """Return the settings, where the configuration asks for them, or None."""
    optim = config.zero.offload_optimizer
    if optim is None or optim.device_states != "travel":
        return None
    return StagedSettings(measured="ratio" not in optim.model_fields_set)


def policy_of(host: UpdateHost, optimizer: Any, settings: StagedSettings, tiers: Tiers) -> UpdatePolicy:
    """Return the policy of an engine with these settings."""
    return StagedUpdate(host, optimizer, tiers) if host.device.type != "cpu" else InlineUpdate(host, optimizer)


class _Visit:
    """Views of one unit: the optimizer's tensors, their places at rest and, for a while, their copies on the device."""

    def __init__(self, views: Sequence[OptimView]) -> None:
        self.views = list(views)
        self.copies: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # shown, at rest, on the device
        self.coming: Transfer = ARRIVED


class StagedUpdate(InlineUpdate):
    """Staged update of one engine. The program launches all work, and waits only for the last states to be home."""

    def __init__(self, host: UpdateHost, optimizer: GroupStep, tiers: Tiers) -> None:
        super().__init__(host, optimizer)
        self._tiers, self._up = tiers, host.up
        self._homes: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._waiting, self._coming = deque[_Visit](), deque[_Visit]()
        self._home_again: Transfer = ARRIVED

    def _update_all(self, views: Sequence[OptimView], factor: Scalar, skip: torch.Tensor | None) -> list[OptimView]:
        staged = [view for view in views if view.unit.plan.loads_states]
        with self._expected([staged] if staged else []), self._states_of(staged):
            return super()._update_all(views, factor, skip)

    def _update_parts(self, parts: list[Part], groups: Groups, factor: Scalar, publication: Publication) -> None:
        with self._expected([views for _, views in parts]):
            super()._update_parts(parts, groups, factor, publication)

    @contextlib.contextmanager
    def _expected(self, turns: Sequence[Sequence[OptimView]]) -> Iterator[None]:
        """Queue those ``turns`` (each of one unit, or of several that do not visit) that visit the device, in this
        order. At the end all have come home: the only wait.
        """
        self._waiting = deque(_Visit(views) for views in turns if views[0].unit.plan.loads_states)
        self._coming.clear()
        self._send_for(InFlight.LOADED - 1)
        try:
            yield
        finally:
            self._waiting.clear()
            self._coming.clear()
            self._home_again.wait()

    @contextlib.contextmanager
    def _states_of(self, views: Sequence[OptimView]) -> Iterator[None]:
        """Keep the optimizer's tensors of ``views``, the next staged ones, on the device inside the context."""
        if not views or not views[0].unit.plan.loads_states:
            yield
            return
        visit = self._coming.popleft()
        visit.coming.wait()
        for shown, _, copy in visit.copies:
            point(shown, copy)
        try:
            yield
        finally:
            self._send_for(InFlight.LOADED - 1)  # ahead of what goes home, which they need not wait for
            self._go_home(visit)

    def _send_for(self, most: int) -> None:
        """Start copying the states of the next visits to the device, up to ``most`` at once."""
        while self._waiting and len(self._coming) < most:
            visit = self._waiting.popleft()
            for view in visit.views:
                state = self.optimizer.state.get(view.param, {})
                slots = [(v, self._home(view, key, v)) for key, v in state.items() if _travels(v, view.param)]
                for shown, on_host in [(view.param, view.param.detach()), *slots]:
                    visit.copies.append((shown, on_host, torch.empty_like(on_host, device=view.unit.device)))
                for key, value in state.items():  # a count of steps stays where it was counted, but for a loaded one
                    if self._counts_there(view, value):
                        state[key] = value.to(view.unit.device)
            visit.coming = self._up.run(lambda visit=visit: _copies(visit))  # type: ignore[misc]
            self._coming.append(visit)

    def _counts_there(self, view: OptimView, value: object) -> bool:
        fused = self.optimizer.param_groups[view.group].get("fused")
        return bool(fused) and isinstance(value, torch.Tensor) and not value.dim() and value.device != view.unit.device

    def _home(self, view: OptimView, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return the place where that slot rests; a new slot, or one that somebody has replaced, is copied there."""
        on_host = self._homes.get((view.param, key))
        if on_host is None or on_host.shape != value.shape or on_host.dtype is not value.dtype:
            on_host = self._tiers.arena.empty(tuple(value.shape), dtype=value.dtype, pin=self._tiers.plan.pin_optim)
            self._homes[view.param, key] = on_host
        if value.device.type == "cpu" and value.data_ptr() != on_host.data_ptr():
            on_host.copy_(value)
            point(value, on_host)
        return on_host

    def _go_home(self, visit: _Visit) -> None:
        for shown, on_host, copy in visit.copies:
            on_host.copy_(copy, non_blocking=True)
            point(shown, on_host)
        copied = {id(shown) for shown, _, _ in visit.copies}
        for view in visit.views:  # slots that the optimizer has made now
            for key, value in self.optimizer.state.get(view.param, {}).items():
                if id(value) not in copied and _travels(value, view.param):
                    on_host = self._home(view, key, value)
                    on_host.copy_(value, non_blocking=True)
                    point(value, on_host)
        visit.copies.clear()
        self._home_again = Landing(0)
        for unit in {view.unit for view in visit.views}:
            unit.pending.note(self._home_again, writes=(StateKind.OPTIM,), copy=True)


def _travels(value: object, param: torch.Tensor) -> bool:
    """Tell whether ``value`` of an optimizer's state is a slot as large as ``param``."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == param.numel()


def _copies(visit: _Visit) -> Transfer:
    for _, on_host, copy in visit.copies:
        copy.copy_(on_host, non_blocking=True)
    return Several([])


class Rates(NamedTuple):
    """Seconds an element: of the host's update; of optimizer state on its way to the device, and back."""

    host: float
    up: float
    down: float

    def device_share(self) -> float:
        """Return the share for which host and bus end together. Both directions of the bus work at once."""
        return self.host / (self.host + max(self.up, self.down))


def slowest(rates: Sequence[Rates]) -> Rates:
    """Return the slowest rate of all ranks in each respect, as ranks wait for each other."""
    return Rates(*map(max, zip(*rates, strict=True)))


def measured_share(base: torch.optim.Optimizer, mesh: Mesh, device: torch.device) -> float:
    """Return the share of the update for which the device's part, whose states travel, takes as long as the host's, by
    measured rates of the slowest rank. 0 where the device is the host. Collective.
    """
    if device.type == "cpu":
        return 0.0
    rates = collectives.gather_objects(_measure(slot_bytes(base) + 4, device), mesh.job)
    return slowest(rates).device_share()


def _measure(nbytes: int, device: torch.device) -> Rates:
    """Measure the rates for ``nbytes`` of weight and slots an element."""
    numel, arena = _NUMEL, Arena(pins=True, keep=False)
    pinned = arena.empty(numel * 4, pin=True)
    abroad = torch.empty_like(pinned, device=device)
    floats = [torch.zeros(numel, device="cpu") for _ in range(nbytes // 4)]
    grad, out = torch.zeros(numel, device="cpu"), torch.zeros(numel, dtype=torch.bfloat16, device="cpu")

    def update() -> None:
        """Read and write about as much as any rule does."""
        if len(floats) == 3 and host_kernels.usable(host_kernels.CPU_ADAM, *floats):
            host_kernels.adam_step(
                floats[0], grad, *floats[1:], step=1, lr=0.0, betas=(0.9, 0.99), eps=1.0, weight_decay=0.0, out=out
            )
            return
        for tensor in floats:
            tensor.add_(grad)
        out.copy_(floats[0])

    times = []
    for action in (update, lambda: abroad.copy_(pinned), lambda: pinned.copy_(abroad)):
        best = float("inf")
        for _ in range(_ROUNDS):
            get_accelerator().synchronize()
            begin = time.perf_counter()
            action()
            get_accelerator().synchronize()
            best = min(best, time.perf_counter() - begin)
        times.append(best / numel)
    return Rates(times[0], times[1] * nbytes / 4, times[2] * nbytes / 4)
