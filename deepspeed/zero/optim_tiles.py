"""The update of what rests on a drive, tile by tile: read the next, update this, write the last.

A tile is one view (``optim_view``): its fp32 weights and every optimizer slot as large as they are. While it is away
the tensors the optimizer knows show their shapes and read as not-a-number. The user's optimizer runs unchanged, with
one tile's views at a time.
"""

import contextlib
import copy
import functools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.errors import UsageError
from deepspeed.tier.aligned import ALIGN
from deepspeed.tier.staging import Staging
from deepspeed.tier.store import TierStore, nothing
from deepspeed.tier.transfer import Several, Transfer
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.param import point
from deepspeed.zero.plan import StateKind


def run_step(optimizer: torch.optim.Optimizer, views: list[OptimView], step: Callable[[], object]) -> list[OptimView]:
    """Call ``step``, which updates ``views``; those whose PARAM at rest the optimizer has written in the same pass."""
    # asked of the class: an object that passes attributes on to an optimizer inside it has steps of its own
    writing = getattr(type(optimizer), "writing_outputs", None)
    outputs = {v.param: out for v in views if (out := v.output()) is not None} if writing is not None else {}
    if writing is None or not outputs:
        step()
        return []
    with writing(optimizer, outputs) as written:
        step()
    return [v for v in views if v.param in written]


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
        self._before = {name: _numbers(holder) for name, holder in self._holders()}
        self._after: dict[str, dict[Any, Any]] = {}

    def take(self, views: list[OptimView]) -> None:
        """One call of ``step`` that sees the parameters of ``views`` only."""
        groups = self._optimizer.param_groups
        lists = [group["params"] for group in groups]
        self._restore(self._before)
        for index, group in enumerate(groups):
            group["params"] = [v.param for v in views if v.group == index]
        try:
            self._optimizer.step()
        finally:
            for group, params in zip(groups, lists, strict=True):
                group["params"] = params
        idle = {f"group {i}" for i in range(len(groups))} - {f"group {v.group}" for v in views}
        for name, holder in self._holders():
            if name not in idle:
                self._keep(name, _numbers(holder))
        self._restore(self._after)

    def _holders(self) -> list[tuple[str, dict[Any, Any]]]:
        """What may hold numbers of its own: the groups, the optimizer's attributes, state that is no parameter's."""
        groups: list[tuple[str, dict[Any, Any]]] = [
            (f"group {i}", group) for i, group in enumerate(self._optimizer.param_groups)
        ]
        return [*groups, ("the optimizer", vars(self._optimizer)), ("its state", self._optimizer.state)]

    def _restore(self, numbers: dict[str, dict[Any, Any]]) -> None:
        for name, holder in self._holders():
            if name in numbers:
                _put_back(holder, numbers[name])

    def _keep(self, name: str, now: dict[Any, Any]) -> None:
        before = self._after.get(name, now)
        if changed := [str(k) for k in now if k not in before or not _same(now[k], before[k])]:
            raise UsageError(
                f"{type(self._optimizer).__name__} keeps {', '.join(changed)} of {name} over all parameters, so it "
                "cannot update them piece by piece, and this update was cut short; use offload_optimizer.device "
                '"cpu", or another optimizer'
            )
        self._after[name] = now


_TORCHS = re.compile("params|state|defaults|param_groups|_optimizer.*")  # what torch keeps in groups and optimizers


def _numbers(holder: dict[Any, Any], *, depth: int = 1) -> dict[Any, Any]:
    """Copies of the numbers in ``holder`` and in the dicts in it; what belongs to single tensors is left out."""
    copies = {}
    for key, value in holder.items():
        if isinstance(key, torch.Tensor) or _TORCHS.fullmatch(str(key)):
            continue
        if isinstance(value, dict) and depth and not any(isinstance(k, torch.Tensor) for k in value):
            copies[key] = _numbers(value, depth=depth - 1)
        elif _is_number(value):
            copies[key] = _copy(value)
    return copies


def _is_number(value: Any) -> bool:
    """A number, a tensor, or a short list of them."""
    if isinstance(value, (list, tuple)):
        return 0 < len(value) <= 16 and all(isinstance(v, (int, float, torch.Tensor)) for v in value)
    return isinstance(value, (int, float, torch.Tensor))


def _copy(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_copy(v) for v in value])
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _put_back(holder: dict[Any, Any], numbers: dict[Any, Any], *, depth: int = 1) -> None:
    """Make the numbers of ``holder``, as deep as ``_numbers`` copied them, the old ones: in the same tensors."""
    for key in _numbers(holder, depth=depth).keys() - numbers.keys():
        del holder[key]
    for key, value in numbers.items():
        now = holder.get(key)
        if isinstance(value, dict) and isinstance(now, dict):
            _put_back(now, value, depth=depth - 1)
        elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.shape == value.shape:
            now.detach().copy_(value)
        else:
            holder[key] = copy.copy(value) if isinstance(value, dict) else _copy(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return all(key in b and _same(value, b[key]) for key, value in a.items())
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

    def of(self, region: torch.Tensor) -> torch.Tensor:
        """The slot in the bytes of its region."""
        return region[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


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
    transfers: list[Transfer] = field(default_factory=list)


class OptimTiles:
    """The views of one engine that are updated one by one, each in a buffer of ``staging``, wherever they rest."""

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
                "this optimizer's state rests on a drive, and its own state_dict() and load_state_dict() see nothing "
                "of it; call them on the optimizer that deepspeed.initialize returned"
            )

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Inside, the optimizer's own state_dict and load_state_dict work: the caller sees to what is on the drive."""
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
                "the last update failed half way through the tiles on the drive, so parameters and optimizer state do "
                "not belong to one step any more; start again from a checkpoint"
            )

    @contextlib.contextmanager
    def attached(self, view: OptimView, *, write: bool = False, publish: bool = False) -> Iterator[None]:
        """Inside, weights and slots of ``view``, if it is one of the tiles, are in memory.

        With ``write`` they are stored at the end, with ``publish`` in PARAM too.
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
        """Where the slots of ``view`` rest, and the byte at which each begins; None and nothing for no tile."""
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
        """Begin to read weights, slots and gradient, each as far behind a page's start as it is on the drive."""
        self._forget_gone(tile)
        view, unit = tile.view, tile.view.unit
        numel, kinds = view.stop - view.start, [StateKind.OPTIM]
        if gradient and unit.on_drive(StateKind.GRAD):
            kinds.append(StateKind.GRAD)
        sources = [(unit.rest[kind], view.start - unit.range_of(kind)[0], numel) for kind in kinds]
        if tile.region is not None:
            sources.append((tile.region, 0, tile.region.tensor.numel()))
        places, end = [], 0
        for store, at, count in sources:
            width = store.tensor.dtype.itemsize
            start = _round_up(end) + at * width % ALIGN
            end = start + count * width
            places.append(slice(start, end))
        buffer = self._staging.take(_round_up(end))
        pieces = [buffer[place].view(store.tensor.dtype) for place, (store, _, _) in zip(places, sources, strict=True)]
        slots = pieces[-1] if tile.region is not None else buffer[:0]
        loaded = _Loaded(tile, buffer, pieces[0], slots, pieces[1] if len(kinds) > 1 else None)
        with self._given_back_on_error(loaded):
            for piece, (store, at, _) in zip(pieces, sources, strict=True):
                loaded.transfers.append(store.get(piece, start=at))
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
            point(state[slot.key], slot.of(loaded.slots))

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
                inside = slot.of(loaded.slots)
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
        tile.region = tile.region or tile.view.unit.rest[StateKind.OPTIM].beside(start)
        buffer = self._staging.take(start)
        for slot in tile.slots:
            slot.of(buffer).copy_(state[slot.key])
        self._staging.give(buffer, after=tile.region.put(buffer[:start], lent=True))
        self._void_slots(tile)

    def _forget_gone(self, tile: _Tile) -> None:
        """Slots that the optimizer has no more (cleared, or a checkpoint without them loaded) need no place either."""
        state = self._optimizer.state.get(tile.view.param, {})
        tile.slots = [s for s in tile.slots if s.key in state]
        if tile.region is not None and not tile.slots:
            tile.region.drop()
            tile.region = None

    def _void_slots(self, tile: _Tile) -> None:
        state = self._optimizer.state.get(tile.view.param, {})
        for slot in tile.slots:
            point(state[slot.key], nothing(slot.shape, slot.dtype))
