"""Resting states read for a save, wherever they rest; those on a drive also later, by another thread, as they were at
one moment.

Nothing of a drive is copied to be saved: whoever wants to write over it waits until it has been read (``Stored.hold``).
As a save reads in the order of the next update, and has the next forward and backward for that, nobody waits as a rule.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from deepspeed.errors import InvalidStateError
from deepspeed.tier.aligned import ALIGN, aligned_empty
from deepspeed.tier.store import TierStore
from deepspeed.tier.stored import Held, Stored
from deepspeed.zero.optim_tiles import OptimTiles
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit

Read = Callable[[int, int], torch.Tensor]  # elements [lo, hi), flat, valid until the next read


@dataclass(frozen=True)
class Slot:
    """One tensor of an optimizer's state. ``like`` has its shape and dtype; values come from ``read``."""

    like: torch.Tensor
    read: Read


@dataclass(frozen=True)
class _Layout:
    """The slots of one view: tensors (on meta where the values are on a drive), and where on it they are."""

    tensors: dict[str, torch.Tensor]
    region: TierStore | None
    places: dict[str, int]


class Reader:
    """Reads the states of one engine for one save. What rests in memory is given as it is: copy it before training goes
    on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, tiles: OptimTiles | None) -> None:
        self._optimizer = optimizer
        self._tiles = tiles
        self._held: dict[int, Held] = {}
        self._layouts: dict[int, _Layout] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._over = False

    def hold(
        self, states: Iterable[tuple[Unit, StateKind]], views: Iterable[OptimView], hurry: Callable[[], None]
    ) -> None:
        """From here on reads of these, which rest on a drive, give the values of now. Raises TransferError.

        ``hurry`` is called when somebody waits for them to be read.
        """
        for unit, kind in states:
            stored = unit.rest[kind]
            assert isinstance(stored, Stored)
            self._held[id(stored)] = stored.hold(hurry)
        for view in views:
            layout = self._layout(view)
            if isinstance(layout.region, Stored):
                self._held[id(layout.region)] = layout.region.hold(hurry)
            tensors = {k: v if v.device.type == "meta" else v.clone() for k, v in layout.tensors.items()}
            self._layouts[id(view)] = replace(layout, tensors=tensors)

    def release(self) -> None:
        """Nothing more can be read. Also after an error, when a reader of parts stands still half way."""
        self._over = True
        for held in list(self._held.values()):
            held.release()
        self._held.clear()
        self._layouts.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @contextlib.contextmanager
    def values(self, unit: Unit, kind: StateKind) -> Iterator[Read]:
        """This rank's range of a state, by elements of that range."""
        stored = unit.rest.get(kind)
        if isinstance(stored, Stored):
            with self._opened(stored) as held:
                yield self._placed(held, 0, stored.dtype)
            return
        with unit.values(kind) as values:
            yield lambda lo, hi: values.detach()[lo:hi]

    @contextlib.contextmanager
    def slots(self, view: OptimView) -> Iterator[dict[str, Slot]]:
        """Every tensor the optimizer keeps for ``view``, by the slot's name, by elements of the flat tensor."""
        layout = self._layouts.pop(id(view), None) or self._layout(view)
        found = {k: Slot(v, _flat(v)) for k, v in layout.tensors.items() if k not in layout.places}
        if not isinstance(layout.region, Stored):
            yield found
            return
        with self._opened(layout.region) as held:
            away = {k: (layout.tensors[k], start) for k, start in layout.places.items()}
            yield found | {k: Slot(like, self._placed(held, start, like.dtype)) for k, (like, start) in away.items()}

    def _layout(self, view: OptimView) -> _Layout:
        state = self._optimizer.state.get(view.param, {}) if self._optimizer is not None else {}
        region, places = self._tiles.region_of(view) if self._tiles is not None else (None, {})
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
        away = {k: torch.empty(v.shape, dtype=v.dtype, device="meta") for k, v in tensors.items() if k in places}
        return _Layout(tensors | away, region, places)

    def _placed(self, held: Held, start: int, dtype: torch.dtype) -> Read:
        return lambda lo, hi: self._read(held, start + lo * dtype.itemsize, (hi - lo) * dtype.itemsize, dtype)

    @contextlib.contextmanager
    def _opened(self, stored: Stored) -> Iterator[Held]:
        if self._over:
            raise InvalidStateError("a state was read for a save that had let go of it; save again")
        if id(stored) not in self._held:
            self._held[id(stored)] = stored.hold(lambda: None)
        held = self._held[id(stored)]
        try:
            yield held
        finally:
            held.release()
            self._held.pop(id(stored), None)

    def _read(self, held: Held, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        # The same place within a page as in the file, so that whole pages can bypass the page cache.
        shift = start % ALIGN
        if self._buffer.numel() < shift + nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # before the larger one is there
            self._buffer = aligned_empty(-(-(shift + nbytes) // ALIGN) * ALIGN)
        inside = self._buffer[shift : shift + nbytes]
        held.read(start, inside)
        return inside.view(dtype)


def _flat(value: torch.Tensor) -> Read:
    flat = value.detach().contiguous().view(-1)
    return lambda lo, hi: flat[lo:hi]
