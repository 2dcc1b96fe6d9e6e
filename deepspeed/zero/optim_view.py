"""What the user's optimizer sees: plain tensors over this rank's master ranges, one per (unit, parameter group).

The optimizer object, its ``param_groups`` list and its group dicts stay the caller's own; only the ``params`` entries
change. What rests on a drive is updated tile by tile: a tile is one view, its fp32 weights and every slot as large as
they are. While it is away the tensors the optimizer knows show their shapes and read as not-a-number.
"""

import contextlib
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.errors import OptimizerConfigError, UsageError
from deepspeed.optim.base import GroupStep
from deepspeed.optim.host import Scalar
from deepspeed.tier.arena import ALIGN
from deepspeed.tier.behind import Worker
from deepspeed.tier.staging import Staging
from deepspeed.tier.store import TierStore, nothing
from deepspeed.tier.transfer import ARRIVED, Several, Transfer
from deepspeed.zero.layout import Granularity, Segment, round_up
from deepspeed.zero.param import point
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.standing import Standing, frozen_later
from deepspeed.zero.update.turns import Turns, copied

_PAGE_NUMEL = 4096  # tiles end where pages do, in any dtype


@dataclass
class OptimView:
    """``param`` covers flat indices [start, stop) of ``unit``; its ``.grad`` is set for the time of a step."""

    unit: Unit
    group: int
    start: int
    stop: int
    param: nn.Parameter
    name: str

    @property
    def on_drive(self) -> bool:
        """Whether its values come into memory for the update only."""
        return self.unit.on_drive(StateKind.OPTIM)

    def within(self, kind: StateKind, flat: torch.Tensor) -> torch.Tensor:
        """Of ``flat``, this rank's range of a state of the unit, what the view covers."""
        return self.unit.within(kind, flat, self.start, self.stop)

    def kept_by(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What ``optimizer`` keeps for it; not by its own door, at which everything comes home first."""
        state: dict[str, Any] = vars(optimizer)["state"].get(self.param, {})
        return state

    def output(self, apart: TierStore | None = None) -> torch.Tensor | None:
        """The part of PARAM at rest, or on its way there, that the optimizer may round this view's weights into; None:
        rounded afterwards. ``apart``: only on its way there, in what is free behind a gradient in that place.
        """
        unit, resting = self.unit, self.unit.shard
        if apart is not None:
            away = unit.device.type != "cpu" and resting.dtype is not self.param.dtype
            box = apart.spare(resting.dtype, keep=True) if away else None
            return None if box is None else self.within(StateKind.OPTIM, box)
        if unit.master_is_param or unit.on_drive(StateKind.PARAM):
            return None
        if resting.device == self.param.device:
            return self.within(StateKind.PARAM, resting)
        box = unit.outbox(spent=False)
        return None if box is None else self.within(StateKind.OPTIM, box)

    def gradient(self, factor: Scalar, *, source: torch.Tensor | None = None, plain: bool = False) -> torch.Tensor:
        """The matching part of the unit's mean gradient times ``factor``, in the view's shape and dtype.

        A gradient in another dtype is converted first: fp16 could not hold it without the loss scale. In the same dtype
        the rest gradient itself is multiplied. ``source`` is that part where the gradient does not rest in memory.
        ``plain``: as it is, for who multiplies it.
        """
        if source is None:
            assert self.unit.grad is not None
            self.unit.landed.wait()
            source = self.within(StateKind.GRAD, self.unit.grad)
        piece = source.view(self.param.shape)
        if plain:
            return piece
        piece, factor = piece.to(self.param.dtype), factor * self.unit.facts.after
        return piece if isinstance(factor, float) and factor == 1.0 else piece.mul_(factor)


def build_views(units: list[Unit], group_count: int, *, tile_numel: int = 0) -> list[OptimView]:
    """Cut every unit's master range into views (not group -1); on a drive of at most ``tile_numel`` elements."""
    views: list[OptimView] = []
    for unit in units:
        if unit.master is None:
            continue
        for name, group, lo, hi, shape in _spans(unit, max(_PAGE_NUMEL, tile_numel // _PAGE_NUMEL * _PAGE_NUMEL)):
            if 0 <= group < group_count:
                param = nn.Parameter(unit.within(StateKind.OPTIM, unit.master, lo, hi).view(shape))
                views.append(OptimView(unit, group, lo, hi, param, name))
                unit.add_view(views[-1])
    return views


def _spans(unit: Unit, tile_numel: int) -> Iterator[tuple[str, int, int, int, tuple[int, ...]]]:
    """Name, group, flat range and shape of each view: a parameter, or what is here of a group, on a drive in tiles.

    Padding inside a group has zero gradients: a longer loop is cheaper than a cut. Tiles end on pages of the range.
    """
    start, stop = unit.range_of(StateKind.OPTIM)
    parts = [(s, *unit.layout.overlap(s, start, stop)) for s in unit.layout.segments]
    parts = [(s, lo, hi) for s, lo, hi in parts if lo < hi]
    if unit.layout.granularity is Granularity.PARAMETER:
        yield from ((s.name, s.group, lo, hi, s.shape) for s, lo, hi in parts)
        return
    for group, those in itertools.groupby(parts, key=lambda part: part[0].group):
        bounds = [bound for _, *both in those for bound in both]
        lo, hi = bounds[0], bounds[-1]
        first_edge = start + ((lo - start) // tile_numel + 1) * tile_numel
        edges = range(first_edge, hi, tile_numel) if unit.on_drive(StateKind.OPTIM) else ()
        for first, last in itertools.pairwise((lo, *edges, hi)):
            yield f"{unit.name}[{group}]", group, first, last, (last - first,)


class MasterList(list[nn.Parameter]):
    """The parameters of a group: who takes one out may read it, and waits for an update under way, as for ``state``."""

    def __init__(self, params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        super().__init__(params)
        self._optimizer = weakref.ref(optimizer)

    def _look(self) -> None:
        if (look := getattr(self._optimizer(), "before_looking", None)) is not None:
            look()

    def __iter__(self) -> Iterator[nn.Parameter]:
        self._look()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._look()
        return super().__getitem__(index)

    def __reduce__(self) -> Any:
        return list, ([*self],)


def attach(optimizer: torch.optim.Optimizer, views: list[OptimView]) -> None:
    """Point the optimizer's groups at the views. Raises OptimizerConfigError when it has already taken steps."""
    initial = check_fresh(optimizer)
    optimizer.state.clear()
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = MasterList([v.param for v in views if v.group == index], optimizer)
    for view in views if initial else ():
        optimizer.state[view.param] = {key: _like(value, view.param) for key, value in initial[view.group].items()}


def check_fresh(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """State per group, if filled at construction (torch's Adagrad): of what is as large as a parameter one element, or
    none of a group without any. OptimizerConfigError after steps.
    """
    if not optimizer.state:
        return {}
    steps = [float(s["step"]) for s in optimizer.state.values() if "step" in s]
    tensors = (v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.numel())
    if len(steps) != len(optimizer.state) or any(steps) or not all((v == v.reshape(-1)[0]).all() for v in tensors):
        raise OptimizerConfigError(
            f"the {type(optimizer).__name__} passed to initialize() has already taken steps (it holds state for "
            f"{len(optimizer.state)} tensors); pass a fresh optimizer, or load its state through the engine"
        )
    initial: dict[int, dict[str, Any]] = {}
    for index, group in enumerate(optimizer.param_groups):
        if group["params"]:
            param = max(group["params"], key=lambda p: p.numel() * (p.dim() > 0))
            initial[index] = {
                k: v.reshape(-1)[:1]
                if isinstance(v, torch.Tensor) and k != "step" and (v.dim() or not param.dim())
                else v
                for k, v in optimizer.state[param].items()
            }
    return initial


def _like(value: Any, param: nn.Parameter) -> Any:
    """An initial slot for ``param``: scalars are copied, of a constant tensor the first element fills its shape."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return copied(value)
    return torch.full_like(param, value.sum().item(), requires_grad=False)


def run_step(
    optimizer: torch.optim.Optimizer,
    views: list[OptimView],
    step: Callable[[], object],
    factor: Scalar,
    *,
    source: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    frozen: dict[Unit, list[Segment]] | None = None,
    apart: Mapping[Unit, TierStore] | None = None,
) -> list[OptimView]:
    """Call ``step``, which updates ``views``, with their gradients (one view's may be ``source``) times ``factor``;
    returns those whose PARAM at rest the optimizer has written in the same pass. ``skip``, which only optimizers with
    ``skips_alone`` understand: a number on the device; where it is not 0 nothing changes. ``frozen``: if that was asked
    before. ``apart``: where the units' gradients are, and PARAM is rounded into what is free behind each.
    """
    # asked of the class: an object that passes attributes on to an optimizer inside it has steps of its own
    writing, places = getattr(type(optimizer), "writing_outputs", None), apart or {}
    frozen = frozen_later(views) if frozen is None else frozen
    writable = [v for v in views if v.unit not in frozen] if writing is not None else []
    outputs = {v.param: out for v in writable if (out := v.output(places.get(v.unit))) is not None}
    scales: dict[torch.Tensor, Scalar] = {}
    if writing is not None and optimizer.undisturbed():  # type: ignore[attr-defined]
        each = {after: factor * after for after in {v.unit.facts.after for v in views}}
        scales = {v.param: each[v.unit.facts.after] for v in views}
        scales |= {p: float(scale) for p, scale in scales.items() if p.device.type == "cpu"}
    standing = Standing(optimizer, frozen)
    try:
        for view in views:
            place = places.get(view.unit)
            if place is not None:
                source = view.within(StateKind.GRAD, place.tensor)
            grad = view.gradient(factor, source=source, plain=view.param in scales)
            if grad.dtype is not view.param.dtype:
                view.param.grad_dtype = None  # any
            view.param.grad = grad if standing.hold(view) else None
        asked: Any = contextlib.nullcontext(())
        if writing is not None and (outputs or scales or skip is not None):
            asked = writing(optimizer, outputs, skip=skip, scales=scales)
        with asked as written:
            step()
    finally:
        standing.put_back()
        for view in views:
            view.param.grad = None
    return [v for v in views if v.param in written]


def captured_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of the groups as they are now, without parameters."""
    return [{k: copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


class _Slot(NamedTuple):
    """One optimizer slot inside a tile's region of bytes; ``void`` is what the optimizer sees while it is away."""

    key: str
    void: torch.Tensor
    start: int

    def of(self, region: torch.Tensor) -> torch.Tensor:
        """The slot in the bytes of its region."""
        piece = region[self.start : self.start + self.void.numel() * self.void.dtype.itemsize]
        return piece.view(self.void.dtype).view(self.void.shape)


class _Tile:
    """One view: what of it rests where, and between ``read`` and ``leave`` the staging buffer that it is in."""

    def __init__(self, view: OptimView, optimizer: torch.optim.Optimizer, staging: Staging) -> None:
        self.view = view
        self.slots: list[_Slot] = []
        self.region: TierStore | None = None
        self.grad: torch.Tensor | None = None
        self._optimizer, self._staging = optimizer, staging
        self._buffer = self._master = self._inside = torch.empty(0)
        self._transfers: list[Transfer] = []
        self._read: list[tuple[TierStore, int]] = []  # from where, and how often that had been written

    @property
    def _state(self) -> dict[str, Any]:
        return self._optimizer.state.get(self.view.param, {})

    def read(self, *, gradient: bool) -> None:
        """Begin to read weights, slots and gradient, each as far behind a page's start as it is on the drive."""
        self.forget_gone()
        unit, numel = self.view.unit, self.view.stop - self.view.start
        kinds = [StateKind.OPTIM, *([StateKind.GRAD] if gradient and unit.on_drive(StateKind.GRAD) else [])]
        sources = [(unit.rest[kind], self.view.start - unit.range_of(kind)[0], numel) for kind in kinds]
        if self.region is not None:
            sources.append((self.region, 0, self.region.tensor.numel()))
        places, end = [], 0
        for store, at, count in sources:
            width = store.tensor.dtype.itemsize
            start = round_up(end, ALIGN) + at * width % ALIGN
            end = start + count * width
            places.append(slice(start, end))
        buffer = self._buffer = self._staging.take(round_up(end, ALIGN))
        pieces = [buffer[place].view(store.tensor.dtype) for place, (store, _, _) in zip(places, sources, strict=True)]
        self._master, self.grad = pieces[0], pieces[1] if len(kinds) > 1 else None
        self._inside = pieces[-1] if self.region is not None else buffer[:0]
        self._transfers = []
        self._read = [(store, store.changes) for store, _, _ in sources]
        with self._given_back_on_error():
            for piece, (store, at, _) in zip(pieces, sources, strict=True):
                self._transfers.append(store.get(piece, start=at))

    def refresh(self) -> None:
        """Read again what was written since ``read``, or is not where it was."""
        self.forget_gone()
        read, now = dict(self._read), [self.view.unit.rest[StateKind.OPTIM], self.region]
        if any(store is not None and read.get(store) != store.changes for store in now):
            self.let_go()
            self.read(gradient=True)

    def show(self) -> None:
        """Let the optimizer see what was read."""
        with self._given_back_on_error():
            for transfer in self._transfers:
                transfer.wait()
        point(self.view.param, self._master.view(self.view.param.shape))
        for slot in self.slots:
            point(self._state[slot.key], slot.of(self._inside))

    def leave(self, *, write: bool, publish: bool) -> None:
        """Give the buffer back. With ``write`` weights and slots are stored, with ``publish`` weights in PARAM too."""
        view, transfers = self.view, []
        try:
            if write:
                place = view.unit.rest[StateKind.OPTIM]
                start = view.start - view.unit.range_of(StateKind.OPTIM)[0]
                transfers.append(place.put(self._master, start=start, lent=True))
                for slot in self.slots if self.region is not None else ():
                    inside, now = slot.of(self._inside), self._state[slot.key]
                    if now.data_ptr() != inside.data_ptr():  # the optimizer put a new tensor there
                        inside.copy_(now)
                if self.region is not None:
                    transfers.append(self.region.put(self._inside, lent=True))
            if publish:
                transfers.append(view.unit.publish_part(view.start, self._master))
        finally:
            point(view.param, nothing(view.param.shape, self._master.dtype))
            for slot in self.slots:
                point(self._state[slot.key], slot.void)
            self._give_back(Several(transfers) if transfers else None)
        if write and not self.slots:
            self.make_slots()

    def let_go(self) -> None:
        """Give back the buffer of what was read for nothing."""
        for transfer in self._transfers:
            with contextlib.suppress(OSError):
                transfer.wait()
        self._give_back()

    def _give_back(self, after: Transfer | None = None) -> None:
        """The staging buffer is another's, ``after`` that."""
        self._staging.give(self._buffer, after=after)
        self._buffer = self._master = self._inside = torch.empty(0)
        self.grad, self._transfers = None, []

    @contextlib.contextmanager
    def _given_back_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.let_go()
            raise

    def make_slots(self) -> None:
        """Give the slots that the optimizer holds in memory their place on the drive."""
        state, numel, start = self._state, self.view.stop - self.view.start, 0
        self.slots.clear()
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == numel and value.is_contiguous():
                self.slots.append(_Slot(key, nothing(tuple(value.shape), value.dtype), start))
                start += round_up(value.nbytes, ALIGN)
        if self.region is not None and self.region.tensor.numel() != start:
            self.region.drop()
            self.region = None
        if not self.slots:
            return
        self.region = self.region or self.view.unit.rest[StateKind.OPTIM].beside(start)
        buffer = self._staging.take(start)
        for slot in self.slots:
            slot.of(buffer).copy_(state[slot.key])
        self._staging.give(buffer, after=self.region.put(buffer[:start], lent=True))
        for slot in self.slots:
            point(state[slot.key], slot.void)

    def forget_gone(self) -> None:
        """Slots that the optimizer has no more (cleared, or a checkpoint without them loaded) need no place either."""
        self.slots = [s for s in self.slots if s.key in self._state]
        if self.region is not None and not self.slots:
            self.region.drop()
            self.region = None


class OptimTiles:
    """The views of one engine that are updated one by one, each in a buffer of ``staging``, wherever they rest."""

    def __init__(self, views: Iterable[OptimView], optimizer: torch.optim.Optimizer, staging: Staging) -> None:
        self._optimizer = optimizer
        # first what other ranks gather after the update, which the program waits for
        ordered = sorted(views, key=lambda view: view.unit.movable)
        self._tiles = {id(view): _Tile(view, optimizer, staging) for view in ordered}
        self._staging = staging
        self._ahead: deque[_Tile] = deque()  # read for the next update
        self._last: Unit | None = None  # of an update behind the program
        self._why = ""  # it has failed
        self.torn = self._whole_state = False  # an update was cut short, here or on another rank: nobody can go on
        self._guards = [
            optimizer.register_state_dict_pre_hook(self._guard),
            optimizer.register_load_state_dict_pre_hook(self._guard),
        ]
        for tile in self._tiles.values():
            tile.view.unit.update_in_tiles()
        self.adopt_state()

    def step(
        self, views: list[OptimView], factor: float, *, spare: Callable[[Unit], bool], worker: Worker | None = None
    ) -> list[OptimView]:
        """Update ``views``, all there are, with their gradients times ``factor``: first those in memory, at once.

        Returns those of them whose PARAM at rest the optimizer has written in the same pass; of tiles PARAM follows.
        To ``worker`` the last units are left, from the first on behind which ``spare`` says so of all.
        """
        turns, resident = Turns(self._optimizer), [v for v in views if not v.unit.tiled]
        at_once = functools.partial(turns.take, resident)
        written = run_step(self._optimizer, resident, at_once, factor) if resident else []
        self.check_whole()
        left = self._left(spare) if worker is not None else {}
        if left and not resident:
            self._optimizer.step()  # without gradients: whoever counts steps, as schedules do, sees one
        course = self._one_by_one(self._later(views, factor) if left else self._now(turns, factor))
        self.torn = True
        deque(itertools.islice(course, len(self._tiles) - sum(left.values())), maxlen=0)
        self.torn = False
        for unit, count in left.items():
            assert worker is not None
            unit.update_behind(worker.hand_over(functools.partial(self._go_on, course, count)))
            self._last = unit
        return written

    def _left(self, spare: Callable[[Unit], bool]) -> dict[Unit, int]:
        """By unit how many tiles may be updated behind the program: not the first time, when slots find their place."""
        optimizer, left = self._optimizer, dict[Unit, int]()
        fits = isinstance(optimizer, GroupStep) and optimizer.scales_on_host()
        if not fits or not all(tile.view.param in optimizer.state for tile in self._tiles.values()):
            return left
        for unit, those in itertools.groupby(reversed(self._tiles.values()), lambda tile: tile.view.unit):
            if not spare(unit):
                break
            left = {unit: len([*those]), **left}
        return left

    def _now(self, turns: Turns, factor: float) -> Callable[[_Tile], list[OptimView]]:
        def update(tile: _Tile) -> list[OptimView]:
            turn = functools.partial(turns.take, [tile.view])
            return run_step(self._optimizer, [tile.view], turn, factor, source=tile.grad)

        return update

    def _later(self, views: list[OptimView], factor: float) -> Callable[[_Tile], list[OptimView]]:
        """With the settings as they are now."""
        optimizer, groups, frozen = self._optimizer, captured_groups(self._optimizer), frozen_later(views)
        assert isinstance(optimizer, GroupStep)

        def update(tile: _Tile) -> list[OptimView]:
            group = groups[tile.view.group] | {"params": [tile.view.param]}
            turn = functools.partial(optimizer.update, [group])
            return run_step(optimizer, [tile.view], turn, factor, source=tile.grad, frozen=frozen)

        return update

    def _one_by_one(self, update: Callable[[_Tile], list[OptimView]]) -> Iterator[None]:
        """Reads the next tiles while one is updated and the last is written; has come so far after each."""
        ahead, self._ahead = self._ahead, deque()
        waiting = deque(itertools.islice(self._tiles.values(), len(ahead), None))
        try:
            for tile in ahead:
                tile.refresh()
            while waiting or ahead:
                while waiting and (not ahead or self._staging.room):
                    waiting[0].read(gradient=True)
                    ahead.append(waiting.popleft())
                (tile := ahead.popleft()).show()
                done: list[OptimView] | None = None
                try:
                    done = update(tile)
                finally:
                    tile.leave(write=done is not None, publish=done == [])
                yield
        finally:
            for tile in ahead:
                tile.let_go()

    def _go_on(self, course: Iterator[None], count: int) -> Transfer:
        try:
            deque(itertools.islice(course, count), maxlen=0)
        except BaseException as error:
            self.torn, self._why = True, f" ({type(error).__name__}: {error})"
            raise
        return ARRIVED

    def read_ahead(self) -> None:
        """Begin to read one more tile of the next update, beside a backward; one buffer is left to others."""
        tile = next(itertools.islice(self._tiles.values(), len(self._ahead), None), None)
        if tile is None or not tile.view.on_drive or tile.view.unit.on_drive(StateKind.GRAD) or self.torn:
            return
        if self._last is not None and not self._last.updated:  # it reads, too
            return
        with contextlib.suppress(OSError):  # the update will meet it
            if self._staging.has_room(2):
                tile.read(gradient=False)
                self._ahead.append(tile)

    def forget_ahead(self) -> None:
        while self._ahead:
            self._ahead.popleft().let_go()

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
        self.forget_ahead()
        for guard in self._guards:
            guard.remove()

    def check_whole(self) -> None:
        """Raise UsageError when an earlier update was cut short: some parameters have moved, others have not."""
        if self.torn:
            raise UsageError(
                f"the last update failed half way through the tiles on the drive{self._why}, so parameters and "
                "optimizer state do not belong to one step any more; start again from a checkpoint"
            )

    @contextlib.contextmanager
    def attached(self, view: OptimView, *, write: bool = False, publish: bool = False) -> Iterator[None]:
        """Inside, weights and slots of ``view``, if it is a tile, are in memory; stored at the end with ``write``."""
        tile = self._tiles.get(id(view))
        if tile is None:
            yield
            return
        self.forget_ahead()
        tile.read(gradient=False)
        tile.show()
        try:
            yield
        finally:
            tile.leave(write=write, publish=publish)

    def region_of(self, view: OptimView) -> tuple[TierStore | None, dict[str, int]]:
        """Where the slots of ``view`` rest, and the byte at which each begins; None and nothing for no tile."""
        tile = self._tiles.get(id(view))
        if tile is None:
            return None, {}
        tile.forget_gone()
        return tile.region, {s.key: s.start for s in tile.slots}

    def adopt_state(self) -> None:
        """Bring slots that the optimizer has made, or loaded, to the drive."""
        self.forget_ahead()
        for tile in self._tiles.values():
            tile.make_slots()
