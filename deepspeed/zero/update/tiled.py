"""The update of what rests on a drive: tile by tile, within the step or, for the last units, behind the program.

A tile is one view, its fp32 weights and every slot as large as they are. While it is away the tensors that the
optimizer knows show their shapes and read as not-a-number.
"""

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from deepspeed.comm import collectives
from deepspeed.errors import UsageError
from deepspeed.optim.base import GroupStep
from deepspeed.tier.arena import ALIGN
from deepspeed.tier.behind import Turn
from deepspeed.tier.staging import Staging
from deepspeed.tier.store import TierStore, nothing
from deepspeed.tier.transfer import ARRIVED, Several, Transfer
from deepspeed.zero.layout import round_up
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.param import point
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit
from deepspeed.zero.update.apply import apply_rule, apply_to_part, captured_groups, frozen_since
from deepspeed.zero.update.partial import Turns
from deepspeed.zero.update.policy import Step, UpdateHost, UpdatePolicy
from deepspeed.zero.update.publish import Publication

# Updates some views, whose gradient may be given, and returns those whose PARAM at rest it has written.
_Update = Callable[[list[OptimView], torch.Tensor | None], list[OptimView]]


class _Slot(NamedTuple):
    """Optimizer slot inside a tile's region of bytes; ``void``: tensor that the optimizer sees while it is away."""

    key: str
    void: torch.Tensor
    start: int

    def of(self, region: torch.Tensor) -> torch.Tensor:
        """Return the slot's view of the bytes of its region."""
        piece = region[self.start : self.start + self.void.numel() * self.void.dtype.itemsize]
        return piece.view(self.void.dtype).view(self.void.shape)


class _Tile:
    """Tile of one view: its places at rest, and between ``read`` and ``leave`` the staging buffer that holds it."""

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
        return self.view.kept_by(self._optimizer)

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
        """Read again if anything was written, or has moved, since ``read``."""
        self.forget_gone()
        read, now = dict(self._read), [self.view.unit.rest[StateKind.OPTIM], self.region]
        if any(store is not None and read.get(store) != store.changes for store in now):
            self.let_go()
            self.read(gradient=True)

    def show(self) -> None:
        """Wait for the read, and point the optimizer's tensors at the staging buffer."""
        with self._given_back_on_error():
            for transfer in self._transfers:
                transfer.wait()
        point(self.view.param, self._master.view(self.view.param.shape))
        for slot in self.slots:
            point(self._state[slot.key], slot.of(self._inside))

    def leave(self, *, write: bool, publish: bool) -> None:
        """Give the buffer back. With ``write`` store weights and slots; with ``publish`` store weights in PARAM too."""
        view, transfers = self.view, []
        try:
            if write:
                place = view.unit.rest[StateKind.OPTIM]
                start = view.start - view.unit.range_of(StateKind.OPTIM)[0]
                transfers.append(place.put(self._master, start=start, zero_copy=True))
                for slot in self.slots if self.region is not None else ():
                    inside, now = slot.of(self._inside), self._state[slot.key]
                    if now.data_ptr() != inside.data_ptr():  # the optimizer put a new tensor there
                        inside.copy_(now)
                if self.region is not None:
                    transfers.append(self.region.put(self._inside, zero_copy=True))
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
        """Give back the buffer of a tile that was read for nothing."""
        for transfer in self._transfers:
            with contextlib.suppress(OSError):
                transfer.wait()
        self._give_back()

    def _give_back(self, after: Transfer | None = None) -> None:
        """Give the staging buffer back, for use by another tile when ``after`` has ended."""
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
        self._staging.give(buffer, after=self.region.put(buffer[:start], zero_copy=True))
        for slot in self.slots:
            point(state[slot.key], slot.void)

    def forget_gone(self) -> None:
        """Forget slots that the optimizer has dropped (cleared, or absent in a loaded checkpoint), and their region."""
        self.slots = [s for s in self.slots if s.key in self._state]
        if self.region is not None and not self.slots:
            self.region.drop()
            self.region = None


class TiledUpdate(UpdatePolicy):
    """Update of one engine's views one by one, each in a buffer of ``staging``, wherever they rest; first those that
    are not tiles, at once.
    """

    def __init__(
        self, host: UpdateHost, optimizer: torch.optim.Optimizer, tiles: Iterable[OptimView], staging: Staging
    ) -> None:
        super().__init__(host, optimizer)
        # First what other ranks gather after the update, which the program waits for.
        ordered = sorted(tiles, key=lambda view: view.unit.movable)
        self._tiles = {id(view): _Tile(view, optimizer, staging) for view in ordered}
        self._staging = staging
        self._ahead: deque[_Tile] = deque()  # read for the next update
        self._turns: list[Turn] = []
        self._why = ""  # an update behind the program has failed
        self.torn = False  # an update was cut short, here or on another rank: nobody can go on
        self._opened = False  # for the optimizer's own state_dict
        self._guards = [
            optimizer.register_state_dict_pre_hook(self._guard),
            optimizer.register_load_state_dict_pre_hook(self._guard),
        ]
        for tile in self._tiles.values():
            tile.view.unit.update_in_tiles()
        self.adopt_state()

    # -- one update ------------------------------------------------------------------------------------------------
    def gradient_ready(self, unit: Unit) -> None:
        """Begin to read one more tile of the next update, beside a backward; one buffer is left to others."""
        tile = next(itertools.islice(self._tiles.values(), len(self._ahead), None), None)
        if tile is None or not tile.view.on_drive or tile.view.unit.on_drive(StateKind.GRAD) or self.torn:
            return
        if any(not turn.done() for turn in self._turns):  # it reads, too
            return
        with contextlib.suppress(OSError):  # the update will meet it
            if self._staging.has_room(2):
                tile.read(gradient=False)
                self._ahead.append(tile)

    def begin_step(self) -> None:
        for turn in self._turns:
            turn.wait()
        self._turns.clear()
        super().begin_step()

    def apply(self, step: Step) -> None:
        """Update and publish; the ranks tell each other how it went."""
        publication = self.host.publication(step.units)
        failure, written = step.failure, list[OptimView]()
        try:
            if failure is None:
                written = self._update(step, publication)
        except Exception as error:
            failure = error
        failed = collectives.failures(failure, self.host.mesh.talk)
        if failure is None and failed:
            self.torn = True
            rank, text = next(iter(failed.items()))
            where = self.host.mesh.title(rank)
            failure = UsageError(f"the update failed half way on {where}: {text}. Start again from a checkpoint")
        if failure is not None:
            self.host.failures.note_known(failure)
            raise failure
        publication.finish(written)

    def _update(self, step: Step, publication: Publication) -> list[OptimView]:
        """Update all views; return those in memory whose PARAM at rest the optimizer has written, too.

        The worker gets the last units: all from the first unit on behind which ``publication`` can leave out every one.
        """
        self.check_whole()
        resident = [view for view in step.views if not view.unit.tiled]
        optimizer = self.optimizer
        if isinstance(optimizer, GroupStep) and optimizer.undisturbed():
            update = self._by_groups(optimizer, step)
            optimizer.step()  # without gradients: whoever counts steps, as schedules do, sees one
        else:
            update = self._by_partial_steps(step)
        written = update(resident, None) if resident else []
        remaining = self._left(publication)
        course = self._one_by_one(update)
        self.torn = True
        deque(itertools.islice(course, len(self._tiles) - sum(remaining.values())), maxlen=0)
        self.torn = False
        for unit, count in remaining.items():
            assert self.host.worker is not None
            turn = self.host.worker.hand_over(functools.partial(self._go_on, course, count))
            unit.note_pending(turn, reads=(StateKind.GRAD,), writes=(StateKind.OPTIM, StateKind.PARAM))
            self._turns.append(turn)
            self.pending = True
        return written

    def _left(self, publication: Publication) -> dict[Unit, int]:
        """Count by unit the tiles to update behind the program: none at first, when slots find their place."""
        optimizer, remaining = self.optimizer, dict[Unit, int]()
        fits = self.host.worker is not None and isinstance(optimizer, GroupStep) and optimizer.scales_on_host()
        if not fits or not all(tile.view.param in vars(optimizer)["state"] for tile in self._tiles.values()):
            return remaining
        for unit, tiles in itertools.groupby(reversed(self._tiles.values()), lambda tile: tile.view.unit):
            if not publication.leave_out(unit):
                break
            remaining = {unit: len([*tiles]), **remaining}
        return remaining

    def _by_groups(self, optimizer: GroupStep, step: Step) -> _Update:
        """Return the update with the settings of the groups as they are now."""
        groups, frozen = captured_groups(optimizer), frozen_since(step.views)

        def update(views: list[OptimView], grad: torch.Tensor | None) -> list[OptimView]:
            return apply_to_part(optimizer, views, groups, step.factor, source=grad, frozen=frozen)

        return update

    def _by_partial_steps(self, step: Step) -> _Update:
        """Return the update of an optimizer that is not this package's, or that a user's hook watches."""
        turns = Turns(self.optimizer)

        def update(views: list[OptimView], grad: torch.Tensor | None) -> list[OptimView]:
            return apply_rule(self.optimizer, views, turns.take, step.factor, source=grad)

        return update

    def _one_by_one(self, update: _Update) -> Iterator[None]:
        """Update tile by tile; read the next tiles while one is updated and the last written; yield after each."""
        ahead, self._ahead = self._ahead, deque()
        waiting = deque(itertools.islice(self._tiles.values(), len(ahead), None))
        try:
            for tile in ahead:
                tile.refresh()
            while waiting or ahead:
                while waiting and (not ahead or self._staging.has_room()):
                    waiting[0].read(gradient=True)
                    ahead.append(waiting.popleft())
                tile = ahead.popleft()
                tile.show()
                done: list[OptimView] | None = None
                try:
                    done = update([tile.view], tile.grad)
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

    # -- whoever reads or writes states ------------------------------------------------------------------------------
    def forget_ahead(self) -> None:
        while self._ahead:
            self._ahead.popleft().let_go()

    def _guard(self, *_: Any) -> None:
        if not self._opened:
            raise UsageError(
                "this optimizer's state rests on a drive, and its own state_dict() and load_state_dict() see nothing "
                "of it; call them on the optimizer that deepspeed.initialize returned"
            )

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Let the optimizer's own state_dict and load_state_dict work inside; the caller sees to the drive."""
        self._opened = True
        try:
            yield
        finally:
            self._opened = False

    def close(self) -> None:
        """Release the optimizer: remove hooks on its state, and drop tiles read ahead."""
        self.forget_ahead()
        for guard in self._guards:
            guard.remove()
        super().close()

    def check(self, *, alone: bool = True) -> None:
        self.check_whole()
        super().check(alone=alone)

    def check_whole(self) -> None:
        """Raise UsageError when an earlier update was cut short: some parameters have moved, others have not."""
        if self.torn:
            raise UsageError(
                f"the last update failed half way through the tiles on the drive{self._why}, so parameters and "
                "optimizer state do not belong to one step any more; start again from a checkpoint"
            )

    def attached(self, view: OptimView, *, write: bool = False, publish: bool = False) -> AbstractContextManager[None]:
        tile = self._tiles.get(id(view))
        return contextlib.nullcontext() if tile is None else self._in_memory(tile, write=write, publish=publish)

    @contextlib.contextmanager
    def _in_memory(self, tile: _Tile, *, write: bool, publish: bool) -> Iterator[None]:
        self.forget_ahead()
        tile.read(gradient=False)
        tile.show()
        try:
            yield
        finally:
            tile.leave(write=write, publish=publish)

    def region_of(self, view: OptimView) -> tuple[TierStore | None, dict[str, int]]:
        tile = self._tiles.get(id(view))
        if tile is None:
            return None, {}
        tile.forget_gone()
        return tile.region, {s.key: s.start for s in tile.slots}

    def adopt_state(self) -> None:
        """Bring slots that the optimizer has made, or loaded, to the drive."""
        self.forget_ahead()
        for tile in self._tiles.values():
            state = tile.view.kept_by(self.optimizer)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):  # torch loads the caller's own tensors, which keep their values
                    state[key] = value.detach() if value.dim() else value.clone()
            tile.make_slots()
