"""Optimizer states that rest in page-locked host memory and travel to the device for their update, and back.

The gradients of these units stay on the device. Their states come on the stream of what goes up, one unit ahead, and
go home behind the update, while the host updates other units (Deep Optimizer States, Maurya et al. 2024).
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from deepspeed.comm.collectives import SideStream
from deepspeed.optim.base import GroupStep
from deepspeed.tier.store import Landing
from deepspeed.tier.transfer import ARRIVED, Several, Transfer
from deepspeed.zero.memory.tiers import Tiers
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.param import point
from deepspeed.zero.plan import InFlight


class _Visit:
    """The views of one unit: what the optimizer sees of them, where it rests and, for a while, its copy here."""

    def __init__(self, views: Sequence[OptimView]) -> None:
        self.views = list(views)
        self.copies: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # shown, at rest, on the device
        self.coming: Transfer = ARRIVED


class Visits:
    """Of one engine. ``up``: the stream on which states come."""

    def __init__(self, optimizer: GroupStep, tiers: Tiers, *, up: SideStream) -> None:
        self._optimizer, self._tiers, self._up = optimizer, tiers, up
        self._homes: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._waiting, self._coming = deque[_Visit](), deque[_Visit]()
        self._home_again: Transfer = ARRIVED

    @contextlib.contextmanager
    def expected(self, turns: Sequence[Sequence[OptimView]]) -> Iterator[None]:
        """Those of ``turns`` (of one unit, or several that stay) that will visit, in order; at the end all are back."""
        self._waiting = deque(_Visit(views) for views in turns if views[0].unit.plan.visits)
        self._coming.clear()
        self._send_for(InFlight.VISITS - 1)
        try:
            yield
        finally:
            self._waiting.clear()
            self._coming.clear()
            self._home_again.wait()

    @contextlib.contextmanager
    def all_at_once(self, views: Sequence[OptimView]) -> Iterator[None]:
        """Inside, everything that visits is on the device: for an optimizer that must be called once."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.expected([those := [view for view in views if view.unit.plan.visits]]))
            stack.enter_context(self.on_device(those))
            yield

    @contextlib.contextmanager
    def on_device(self, views: Sequence[OptimView]) -> Iterator[None]:
        """Inside, what the optimizer knows of ``views``, the next that visit, is on the device."""
        if not views[0].unit.plan.visits:
            yield
            return
        visit = self._coming.popleft()
        visit.coming.wait()
        for shown, _, copy in visit.copies:
            point(shown, copy)
        try:
            yield
        finally:
            self._send_for(InFlight.VISITS - 1)  # ahead of what goes home, which they need not wait for
            self._go_home(visit)

    def _send_for(self, most: int) -> None:
        """Let the next ones come, up to so many."""
        while self._waiting and len(self._coming) < most:
            visit = self._waiting.popleft()
            for view in visit.views:
                state = self._optimizer.state.get(view.param, {})
                slots = [(v, self._home(view, key, v)) for key, v in state.items() if _travels(v, view.param)]
                for shown, home in [(view.param, view.param.detach()), *slots]:
                    visit.copies.append((shown, home, torch.empty_like(home, device=view.unit.device)))
                for key, value in state.items():  # a count of steps stays where it was counted, but for a loaded one
                    if self._counts_there(view, value):
                        state[key] = value.to(view.unit.device)
            visit.coming = self._up.run(lambda visit=visit: _copies(visit))  # type: ignore[misc]
            self._coming.append(visit)

    def _counts_there(self, view: OptimView, value: object) -> bool:
        fused = self._optimizer.param_groups[view.group].get("fused")
        return bool(fused) and isinstance(value, torch.Tensor) and not value.dim() and value.device != view.unit.device

    def _home(self, view: OptimView, key: str, value: torch.Tensor) -> torch.Tensor:
        """Where that slot rests; values that somebody has put in its place, or that are new, go there."""
        home = self._homes.get((view.param, key))
        if home is None or home.shape != value.shape or home.dtype is not value.dtype:
            home = self._tiers.arena.empty(tuple(value.shape), dtype=value.dtype, pin=self._tiers.plan.pin_optim)
            self._homes[view.param, key] = home
        if value.device.type == "cpu" and value.data_ptr() != home.data_ptr():
            home.copy_(value)
            point(value, home)
        return home

    def _go_home(self, visit: _Visit) -> None:
        for shown, home, copy in visit.copies:
            home.copy_(copy, non_blocking=True)
            point(shown, home)
        known = {id(shown) for shown, _, _ in visit.copies}
        for view in visit.views:  # slots that the optimizer has made now
            for key, value in self._optimizer.state.get(view.param, {}).items():
                if id(value) not in known and _travels(value, view.param):
                    home = self._home(view, key, value)
                    home.copy_(value, non_blocking=True)
                    point(value, home)
        visit.copies.clear()
        self._home_again = Landing(0)
        for unit in {view.unit for view in visit.views}:
            unit.note_landing(self._home_again)


def _travels(value: object, param: torch.Tensor) -> bool:
    """Whether ``value`` of an optimizer's state is a slot as large as ``param``."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == param.numel()


def _copies(visit: _Visit) -> Transfer:
    for _, home, copy in visit.copies:
        copy.copy_(home, non_blocking=True)
    return Several([])
