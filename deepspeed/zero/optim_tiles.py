"""The update of what rests on a drive, tile by tile: read the next, update this, write the last.

A tile is one view (``optim_view``): its fp32 weights and every optimizer slot as large as they are. While it is away the tensors the
optimizer knows show their shapes and read as not-a-number. The user's optimizer runs unchanged, with one tile's views at a time.
"""

import contextlib
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.errors import UsageError
from deepspeed.optim.base import slot_bytes
from deepspeed.tier.aio import Transfer
from deepspeed.tier.aligned import ALIGN
from deepspeed.tier.stored import Stored
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import StateKind
from deepspeed.zero.tiers import Tiers


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class Turns:
    """Lets an optimizer take one step in several turns, each over some of its tensors.

    Every turn begins with the numbers of the groups and of the optimizer itself (a step count, say) as they were before the step, and
    must leave the same: an optimizer that gathers something over all parameters cannot work in turns. Raises UsageError for such.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = [_numbers(holder) for holder in self._holders()]
        self._after: list[dict[str, Any]] = [{} for _ in self._before]

    def take(self, views: list[OptimView]) -> None:
        """One call of ``step`` that sees the parameters of ``views`` only."""
        groups = self._optimizer.param_groups
        lists = [group["params"] for group in groups]
        for holder, before in zip(self._holders(), self._before, strict=True):
            _put_back(holder, before)
        for index, group in enumerate(groups):
            group["params"] = [v.param for v in views if v.group == index]
        try:
            self._optimizer.step()
        finally:
            for group, params in zip(groups, lists, strict=True):
                group["params"] = params
        used = {v.group for v in views} | {len(groups)}
        for index, holder in enumerate(self._holders()):
            if index in used:
                self._settle(index, _numbers(holder))
        for holder, after in zip(self._holders(), self._after, strict=True):
            if after:
                _put_back(holder, after)

    def _holders(self) -> list[dict[str, Any]]:
        """What may hold numbers of its own: the groups, then the optimizer's attributes."""
        return [*self._optimizer.param_groups, vars(self._optimizer)]

    def _settle(self, index: int, now: dict[str, Any]) -> None:
        earlier = self._after[index]
        changed = [k for k in now if k not in earlier or not _same(now[k], earlier[k])] if earlier else []
        if changed:
            where = f"of group {index}" if index < len(self._optimizer.param_groups) else "of the optimizer"
            raise UsageError(
                f"{type(self._optimizer).__name__} keeps {', '.join(changed)} {where} over all parameters, so it cannot update them "
                'piece by piece; use offload_optimizer.device "cpu", or another optimizer'
            )
        self._after[index] = now


def _numbers(holder: dict[str, Any]) -> dict[str, Any]:
    """Copies of the numbers in ``holder``, as plain values or tensors."""
    found = {k: v for k, v in holder.items() if isinstance(v, (int, float, torch.Tensor))}
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def _put_back(holder: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Make the numbers of ``holder`` those of ``numbers``: the same tensors with the old values, nothing that came later."""
    for key in [k for k, v in holder.items() if isinstance(v, (int, float, torch.Tensor)) and k not in numbers]:
        del holder[key]
    for key, value in numbers.items():
        held = holder.get(key)
        if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) and held.shape == value.shape:
            held.detach().copy_(value)
        else:
            holder[key] = value.clone() if isinstance(value, torch.Tensor) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)


@dataclass(frozen=True)
class _Slot:
    """One optimizer slot inside a tile's region of bytes."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    nbytes: int


@dataclass
class _Tile:
    view: OptimView
    slots: list[_Slot] = field(default_factory=list)
    region: Stored | None = None


@dataclass
class _Loaded:
    """A tile in a staging buffer, or on its way there."""

    tile: _Tile
    buffer: torch.Tensor
    master: torch.Tensor
    slots: torch.Tensor
    grad: torch.Tensor | None
    transfers: list[Transfer]


class _Several:
    """Transfers that end together."""

    def __init__(self, transfers: list[Transfer]) -> None:
        self._transfers = transfers

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()

    def done(self) -> bool:
        return all(t.done() for t in self._transfers)


class OptimTiles:
    """The views of one engine that rest on a drive."""

    def __init__(self, views: Iterable[OptimView], optimizer: torch.optim.Optimizer, tiers: Tiers) -> None:
        self._optimizer = optimizer
        self._tiers = tiers
        self._tiles = [_Tile(v) for v in views if v.on_drive]
        self._by_view = {id(t.view): t for t in self._tiles}
        self._staging = tiers.optim_drive().staging
        self._torn = False
        self.adopt_state()
        # The first update makes the slots; a drive without room for them must say so before it.
        missing = [t.view.stop - t.view.start for t in self._tiles if not t.slots]
        each = slot_bytes(optimizer)
        tiers.optim_drive().expect(sum(each * numel + 2 * ALIGN for numel in missing) if each else 0)

    def step(self, factor: float, turns: Turns) -> None:
        """Update every tile with its gradient times ``factor``, and the parameters with it."""
        self.check_whole()
        self._torn = True
        waiting, ahead = deque(self._tiles), deque[_Loaded]()
        try:
            while waiting or ahead:
                while waiting and (not ahead or self._staging.room):
                    ahead.append(self._start(waiting.popleft(), gradient=True))
                self._update(ahead.popleft(), factor, turns)
        finally:
            for loaded in ahead:
                self._staging.give(loaded.buffer, after=_Several(loaded.transfers))
        self._torn = False

    def check_whole(self) -> None:
        """Raise UsageError when an earlier update was cut short: some parameters have moved, others have not."""
        if self._torn:
            raise UsageError(
                "the last update failed half way through the tiles on the drive, so parameters and optimizer state do not belong to one "
                "step any more; start again from a checkpoint"
            )

    @contextlib.contextmanager
    def attached(self, view: OptimView, *, write: bool = False, publish: bool = False) -> Iterator[None]:
        """Inside, weights and slots of ``view`` are in memory; with ``write`` they are stored at the end, with ``publish`` in PARAM too.

        Views that rest in memory anyway are left alone.
        """
        tile = self._by_view.get(id(view))
        if tile is None:
            yield
            return
        loaded = self._start(tile, gradient=False)
        self._attach(loaded)
        try:
            yield
        finally:
            self._detach(loaded, write=write, publish=publish)

    def adopt_state(self) -> None:
        """Bring slots that the optimizer has made, or loaded, to the drive."""
        for tile in self._tiles:
            self._make_slots(tile)

    # -- one tile ------------------------------------------------------------------------------------------------------------
    def _start(self, tile: _Tile, *, gradient: bool) -> _Loaded:
        view, unit = tile.view, tile.view.unit
        numel = view.stop - view.start
        master = unit.stored[StateKind.OPTIM]
        at = view.start - unit.range_of(StateKind.OPTIM)[0]
        width = master.dtype.itemsize
        shift = at * width % ALIGN
        slots_at = _round_up(shift + numel * width)
        slot_bytes = tile.region.numel if tile.region is not None else 0
        grad = unit.stored.get(StateKind.GRAD) if gradient else None
        grad_at = grad_width = grad_shift = 0
        if grad is not None:
            grad_width, grad_at = grad.dtype.itemsize, view.start - unit.range_of(StateKind.GRAD)[0]
            grad_shift = slots_at + _round_up(slot_bytes) + grad_at * grad_width % ALIGN
        buffer = self._staging.take(max(slots_at + slot_bytes, grad_shift + numel * grad_width))
        weights = buffer[shift : shift + numel * width].view(master.dtype)
        transfers = [master.read_into(weights, start=at)]
        slots = buffer[slots_at : slots_at + slot_bytes]
        if tile.region is not None:
            transfers.append(tile.region.read_into(slots, start=0))
        gradients = None
        if grad is not None:
            gradients = buffer[grad_shift : grad_shift + numel * grad_width].view(grad.dtype)
            transfers.append(grad.read_into(gradients, start=grad_at))
        return _Loaded(tile, buffer, weights, slots, gradients, transfers)

    def _update(self, loaded: _Loaded, factor: float, turns: Turns) -> None:
        view = loaded.tile.view
        self._attach(loaded)
        try:
            view.param.grad = view.gradient(factor, source=loaded.grad)
            still = view.frozen_parts(view.param.detach())
            turns.take([view])
            for part, values in still:
                part.copy_(values)
        except BaseException:
            self._detach(loaded, write=False, publish=False)
            raise
        finally:
            view.param.grad = None
        self._detach(loaded, write=True, publish=True)

    def _attach(self, loaded: _Loaded) -> None:
        view = loaded.tile.view
        for transfer in loaded.transfers:
            transfer.wait()
        view.param.data = loaded.master.view(view.param.shape)
        state = self._optimizer.state.get(view.param, {})
        for slot in loaded.tile.slots:
            state[slot.key].data = loaded.slots[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape)

    def _detach(self, loaded: _Loaded, *, write: bool, publish: bool) -> None:
        tile, view = loaded.tile, loaded.tile.view
        transfers: list[Transfer] = []
        try:
            if write:
                transfers = self._store(loaded)
            if publish:
                view.unit.publish_part(view.start, loaded.master)
        finally:
            view.param.data = _away(loaded.master.dtype, view.param.shape)
            self._void_slots(tile)
            self._staging.give(loaded.buffer, after=_Several(transfers) if transfers else None)
        if write and not tile.slots:
            self._make_slots(tile)

    def _store(self, loaded: _Loaded) -> list[Transfer]:
        tile, view = loaded.tile, loaded.tile.view
        unit = view.unit
        base = unit.range_of(StateKind.OPTIM)[0]
        transfers = [unit.stored[StateKind.OPTIM].write_from(loaded.master, start=view.start - base)]
        if tile.region is not None:
            state = self._optimizer.state[view.param]
            for slot in tile.slots:
                inside = loaded.slots[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape)
                if state[slot.key].data_ptr() != inside.data_ptr():  # the optimizer put a new tensor there
                    inside.copy_(state[slot.key])
            transfers.append(tile.region.write_from(loaded.slots, start=0))
        return transfers

    def _make_slots(self, tile: _Tile) -> None:
        """Give the slots that the optimizer holds in memory their place on the drive."""
        state = self._optimizer.state.get(tile.view.param, {})
        numel, start = tile.view.stop - tile.view.start, 0
        tile.slots.clear()
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == numel and value.is_contiguous():
                tile.slots.append(_Slot(key, tuple(value.shape), value.dtype, start, value.nbytes))
                start += _round_up(value.nbytes)
        if tile.region is not None and tile.region.numel != start:
            tile.region.drop()
            tile.region = None
        if not tile.slots:
            return
        if tile.region is None:
            tile.region = self._tiers.store_optim(start, torch.uint8)
        buffer = self._staging.take(start)
        for slot in tile.slots:
            buffer[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape).copy_(state[slot.key])
        self._staging.give(buffer, after=tile.region.write_from(buffer[:start], start=0))
        self._void_slots(tile)

    def _void_slots(self, tile: _Tile) -> None:
        state = self._optimizer.state.get(tile.view.param, {})
        for slot in tile.slots:
            state[slot.key].data = _away(slot.dtype, slot.shape)


def _away(dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    return torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype).expand(tuple(shape))
