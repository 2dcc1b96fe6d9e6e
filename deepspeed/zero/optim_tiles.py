"""The update of what rests on a drive, tile by tile: read the next, update this, write the last.

A tile is one view (``optim_view``): its fp32 weights and every optimizer slot as large as they are. While it is away
the tensors the optimizer knows show their shapes and read as not-a-number. The user's optimizer runs unchanged, with
one tile's views at a time.
"""

import contextlib
import functools
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.errors import UsageError
from deepspeed.tier.aligned import ALIGN
from deepspeed.tier.staging import Staging
from deepspeed.tier.store import TierStore, nothing
from deepspeed.tier.transfer import Several, Transfer
from deepspeed.zero.optim_view import OptimView, run_step
from deepspeed.zero.param import point
from deepspeed.zero.plan import StateKind


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class Turns:
    """Lets an optimizer take one step in several turns, each over some of its tensors.

    Every turn begins with the numbers of the groups and of the optimizer itself (a step count, say) as they were before
    the step, and must leave the same: an optimizer that gathers something over all parameters cannot work in turns.
    Raises UsageError for such.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = {name: _numbers(holder) for name, holder in self._holders().items()}
        self._after: dict[str, dict[str, Any]] = {}

    def take(self, views: list[OptimView]) -> None:
        """One call of ``step`` that sees the parameters of ``views`` only."""
        groups = self._optimizer.param_groups
        lists = [group["params"] for group in groups]
        for name, holder in self._holders().items():
            if name in self._before:
                _put_back(holder, self._before[name])
            else:
                self._drop(name)
        for index, group in enumerate(groups):
            group["params"] = [v.param for v in views if v.group == index]
        try:
            self._optimizer.step()
        finally:
            for group, params in zip(groups, lists, strict=True):
                group["params"] = params
        idle = {f"group {i}" for i in range(len(groups))} - {f"group {v.group}" for v in views}
        for name, holder in self._holders().items():
            if name not in idle:
                self._settle(name, _numbers(holder))
        for name, holder in self._holders().items():
            if name in self._after:
                _put_back(holder, self._after[name])

    def _holders(self) -> dict[str, dict[str, Any]]:
        """What may hold numbers of its own: the groups, the optimizer's attributes, dicts among those, state that is
        nobody's.
        """
        own = vars(self._optimizer)
        found = {f"group {i}": group for i, group in enumerate(self._optimizer.param_groups)}
        found["the optimizer"] = own
        found |= {
            f"its {k}": v for k, v in own.items() if isinstance(v, dict) and not _TORCHS.match(k) and not _by_tensor(v)
        }
        shared = {k: v for k, v in self._optimizer.state.items() if not isinstance(k, torch.Tensor)}
        return found | {
            f"its state[{k!r}]": v if isinstance(v, dict) else _Cell(self._optimizer.state, k)
            for k, v in shared.items()
        }

    def _drop(self, name: str) -> None:
        """Take away a dict that an earlier turn of this step has made."""
        own: dict[Any, Any] = vars(self._optimizer)
        state: dict[Any, Any] = self._optimizer.state
        for key in [k for k in own if f"its {k}" == name]:
            del own[key]
        for key in [k for k in state if not isinstance(k, torch.Tensor) and f"its state[{k!r}]" == name]:
            del state[key]

    def _settle(self, name: str, now: dict[str, Any]) -> None:
        earlier = self._after.get(name)
        changed = [k for k in now if k not in earlier or not _same(now[k], earlier[k])] if earlier is not None else []
        if changed:
            raise UsageError(
                f"{type(self._optimizer).__name__} keeps {', '.join(map(str, changed))} of {name} over all "
                "parameters, so it cannot update "
                'them piece by piece, and this update was cut short; use offload_optimizer.device "cpu", or '
                "another optimizer"
            )
        self._after[name] = now


_TORCHS = re.compile("state|defaults|param_groups|_optimizer.*")


def _by_tensor(mapping: dict[Any, Any]) -> bool:
    """Whether the entries belong to single parameters."""
    return any(isinstance(key, torch.Tensor) for key in mapping)


class _Cell(dict[str, Any]):
    """One entry of a mapping, as a holder of its own."""

    def __init__(self, home: Any, key: Any) -> None:
        super().__init__({"value": home[key]})
        self._home, self._key = home, key

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._home[self._key] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._home[self._key]


def _numbers(holder: dict[str, Any]) -> dict[str, Any]:
    """Copies of the numbers in ``holder``, as plain values or tensors."""
    return {k: _copy(v) for k, v in holder.items() if k != "params" and _is_number(v)}


def _is_number(value: Any) -> bool:
    """A number, a tensor, or a short list of them."""
    if isinstance(value, (list, tuple)):
        return 0 < len(value) <= 16 and all(isinstance(v, (int, float, torch.Tensor)) for v in value)
    return isinstance(value, (int, float, torch.Tensor))


def _copy(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_copy(v) for v in value])
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _put_back(holder: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Make the numbers of ``holder`` those of ``numbers``: the same tensors with the old values, nothing that came
    later.
    """
    for key in [k for k, v in holder.items() if k != "params" and _is_number(v) and k not in numbers]:
        del holder[key]
    for key, value in numbers.items():
        held = holder.get(key)
        if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) and held.shape == value.shape:
            held.detach().copy_(value)
        else:
            holder[key] = _copy(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


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
    region: TierStore | None = None


@dataclass
class _Loaded:
    """A tile in a staging buffer, or on its way there."""

    tile: _Tile
    buffer: torch.Tensor
    master: torch.Tensor
    slots: torch.Tensor
    grad: torch.Tensor | None
    transfers: list[Transfer]


class OptimTiles:
    """The views of one engine that are updated one by one, wherever they rest; each comes into a buffer of ``staging``
    for that.
    """

    def __init__(self, views: Iterable[OptimView], optimizer: torch.optim.Optimizer, staging: Staging) -> None:
        self._optimizer = optimizer
        self._tiles = [_Tile(v) for v in views]
        for tile in self._tiles:
            tile.view.unit.update_in_tiles()
        self._by_view = {id(t.view): t for t in self._tiles}
        self._staging = staging
        self._torn = False
        self._whole_state = False
        self._guards = [
            optimizer.register_state_dict_pre_hook(self._guard),
            optimizer.register_load_state_dict_pre_hook(self._guard),
        ]
        self.adopt_state()

    def __contains__(self, view: OptimView) -> bool:
        return id(view) in self._by_view

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
                self._staging.give(loaded.buffer, after=Several(loaded.transfers))
        self._torn = False

    def _guard(self, *_: Any) -> None:
        if not self._whole_state:
            raise UsageError(
                "this optimizer's state rests on a drive, and its own state_dict() and load_state_dict() see "
                "nothing of it; call them on "
                "the optimizer that deepspeed.initialize returned"
            )

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Inside, the optimizer's own state_dict and load_state_dict may be called: the caller sees to what is on the
        drive.
        """
        self._whole_state = True
        try:
            yield
        finally:
            self._whole_state = False

    def close(self) -> None:
        """Let go of the optimizer."""
        for guard in self._guards:
            guard.remove()

    def tear(self) -> None:
        """An update was cut short on another rank: nobody can go on."""
        self._torn = True

    def check_whole(self) -> None:
        """Raise UsageError when an earlier update was cut short: some parameters have moved, others have not."""
        if self._torn:
            raise UsageError(
                "the last update failed half way through the tiles on the drive, so parameters and optimizer "
                "state do not belong to one "
                "step any more; start again from a checkpoint"
            )

    @contextlib.contextmanager
    def attached(self, view: OptimView, *, write: bool = False, publish: bool = False) -> Iterator[None]:
        """Inside, weights and slots of ``view`` are in memory; with ``write`` they are stored at the end, with
        ``publish`` in PARAM too.

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

    def region_of(self, view: OptimView) -> tuple[TierStore | None, dict[str, int]]:
        """Where the slots of ``view`` rest on the drive, and the byte at which each begins there; None and nothing for
        other views.
        """
        tile = self._by_view.get(id(view))
        if tile is None:
            return None, {}
        self._forget_gone(tile)
        return tile.region, {s.key: s.start for s in tile.slots}

    def adopt_state(self) -> None:
        """Bring slots that the optimizer has made, or loaded, to the drive."""
        for tile in self._tiles:
            self._make_slots(tile)

    # -- one tile -------------------------------------------------------------------------------------------------
    def _start(self, tile: _Tile, *, gradient: bool) -> _Loaded:
        self._forget_gone(tile)
        view, unit = tile.view, tile.view.unit
        numel = view.stop - view.start
        master = unit.rest[StateKind.OPTIM]
        at = view.start - unit.range_of(StateKind.OPTIM)[0]
        width = master.tensor.dtype.itemsize
        shift = at * width % ALIGN
        slots_at = _round_up(shift + numel * width)
        slot_bytes = tile.region.tensor.numel() if tile.region is not None else 0
        grad = unit.rest[StateKind.GRAD] if gradient and unit.on_drive(StateKind.GRAD) else None
        grad_at = grad_width = grad_shift = 0
        if grad is not None:
            grad_width, grad_at = grad.tensor.dtype.itemsize, view.start - unit.range_of(StateKind.GRAD)[0]
            grad_shift = slots_at + _round_up(slot_bytes) + grad_at * grad_width % ALIGN
        buffer = self._staging.take(max(slots_at + slot_bytes, grad_shift + numel * grad_width))
        weights = buffer[shift : shift + numel * width].view(master.tensor.dtype)
        slots = buffer[slots_at : slots_at + slot_bytes]
        gradients = (
            buffer[grad_shift : grad_shift + numel * grad_width].view(grad.tensor.dtype) if grad is not None else None
        )
        loaded = _Loaded(tile, buffer, weights, slots, gradients, [])
        with self._given_back_on_error(loaded):
            loaded.transfers.append(master.get(weights, start=at))
            if tile.region is not None:
                loaded.transfers.append(tile.region.get(slots))
            if grad is not None and gradients is not None:
                loaded.transfers.append(grad.get(gradients, start=grad_at))
        return loaded

    @contextlib.contextmanager
    def _given_back_on_error(self, loaded: _Loaded) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for transfer in loaded.transfers:
                with contextlib.suppress(OSError):
                    transfer.wait()
            self._staging.give(loaded.buffer)
            raise

    def _update(self, loaded: _Loaded, factor: float, turns: Turns) -> None:
        view = loaded.tile.view
        self._attach(loaded)
        try:
            view.param.grad = view.gradient(factor, source=loaded.grad)
            still = view.frozen_parts(view.param.detach())
            written = run_step(self._optimizer, [view], functools.partial(turns.take, [view]))
            for part, values in still:
                part.copy_(values)
        except BaseException:
            self._detach(loaded, write=False, publish=False)
            raise
        finally:
            view.param.grad = None
        self._detach(loaded, write=True, publish=not written)

    def _attach(self, loaded: _Loaded) -> None:
        view = loaded.tile.view
        with self._given_back_on_error(loaded):
            for transfer in loaded.transfers:
                transfer.wait()
        point(view.param, loaded.master.view(view.param.shape))
        state = self._optimizer.state.get(view.param, {})
        for slot in loaded.tile.slots:
            point(
                state[slot.key], loaded.slots[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape)
            )

    def _detach(self, loaded: _Loaded, *, write: bool, publish: bool) -> None:
        tile, view = loaded.tile, loaded.tile.view
        transfers: list[Transfer] = []
        try:
            if write:
                transfers = self._store(loaded)
            if publish:
                transfers.append(view.unit.publish_part(view.start, loaded.master))
        finally:
            point(view.param, nothing(view.param.shape, loaded.master.dtype))
            self._void_slots(tile)
            self._staging.give(loaded.buffer, after=Several(transfers) if transfers else None)
        if write and not tile.slots:
            self._make_slots(tile)

    def _store(self, loaded: _Loaded) -> list[Transfer]:
        tile, view = loaded.tile, loaded.tile.view
        unit = view.unit
        base = unit.range_of(StateKind.OPTIM)[0]
        transfers = [unit.rest[StateKind.OPTIM].put(loaded.master, start=view.start - base, lent=True)]
        if tile.region is not None:
            state = self._optimizer.state[view.param]
            for slot in tile.slots:
                inside = loaded.slots[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape)
                if state[slot.key].data_ptr() != inside.data_ptr():  # the optimizer put a new tensor there
                    inside.copy_(state[slot.key])
            transfers.append(tile.region.put(loaded.slots, lent=True))
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
        if tile.region is not None and tile.region.tensor.numel() != start:
            tile.region.drop()
            tile.region = None
        if not tile.slots:
            return
        if tile.region is None:
            tile.region = tile.view.unit.rest[StateKind.OPTIM].beside(start)
        buffer = self._staging.take(start)
        for slot in tile.slots:
            buffer[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape).copy_(state[slot.key])
        self._staging.give(buffer, after=tile.region.put(buffer[:start], lent=True))
        self._void_slots(tile)

    def _forget_gone(self, tile: _Tile) -> None:
        """Slots that the optimizer has no more (its state was cleared, or a checkpoint without them loaded) need no
        place either.
        """
        state = self._optimizer.state.get(tile.view.param, {})
        tile.slots = [s for s in tile.slots if s.key in state]
        if tile.region is not None and not tile.slots:
            tile.region.drop()
            tile.region = None

    def _void_slots(self, tile: _Tile) -> None:
        state = self._optimizer.state.get(tile.view.param, {})
        for slot in tile.slots:
            point(state[slot.key], nothing(slot.shape, slot.dtype))
