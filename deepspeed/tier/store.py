"""Where a state rests: one set of verbs for memory of any device and for drives."""

import contextlib
from collections.abc import Iterator

import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.tier.transfer import ARRIVED, Transfer

_PIECE_NUMEL = 1 << 24  # that many fp32 numbers at once on their way to a device: 64 MiB


class TierStore:
    """Flat elements of one state in one place: here the memory of the host or a device, as ``tensor``. A subclass keeps
    them on a drive, and its ``tensor`` reads as not-a-number.
    """

    on_drive = False
    changes = 0  # writes so far, of what is on a drive

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = self._memory = tensor

    def put(self, values: torch.Tensor, *, start: int = 0, zero_copy: bool = False) -> Transfer:
        """Store ``values`` (any device, any floating dtype) at element ``start``. With ``zero_copy`` they stay
        untouched until the transfer has ended, and need no copy on the way.
        """
        return round_into(self.tensor[start : start + values.numel()], values)

    def get(self, out: torch.Tensor, *, start: int = 0) -> Transfer:
        """Fill ``out`` (any device) with the elements from ``start`` on."""
        # Ordered by the stream that asks; the host may read at once what it copied itself.
        out.copy_(self.tensor[start : start + out.numel()], non_blocking=out.device.type != "cpu")
        return ARRIVED

    @contextlib.contextmanager
    def open(self, *, write: bool) -> Iterator[torch.Tensor]:
        """Yield all elements in memory; changes to them are kept only with ``write``."""
        yield self.tensor

    def beside(self, nbytes: int) -> "TierStore":
        """Make a store of ``nbytes`` bytes in the same place."""
        return TierStore(torch.empty(nbytes, dtype=torch.uint8, device=self.tensor.device))

    def drop(self) -> None:
        """Drop the values, which nobody needs any more, and free their space."""
        self.tensor = self._memory = self.tensor[:0].clone()

    def hold_as(self, dtype: torch.dtype) -> None:
        """Hold as many elements of ``dtype``, in the first bytes of memory made for wider ones. Values are lost."""
        if self.tensor.dtype is not dtype:
            self.tensor = self._memory.view(dtype)[: self._memory.numel()]

    def spare(self, dtype: torch.dtype, *, keep: bool) -> torch.Tensor | None:
        """Return room for as many elements of ``dtype`` behind those of ``hold_as`` (not ``keep``: in all), or None."""
        whole, nbytes = self._memory.view(torch.uint8), self.tensor.numel() * dtype.itemsize
        fits = nbytes + (self.tensor.nbytes if keep else 0) <= whole.numel()
        return whole[whole.numel() - nbytes :].view(dtype) if fits else None

    def read_ahead(self) -> bool:
        """Start fetching for a later ``get`` of everything; return False if there is nothing to start, or no room."""
        return False

    def forget_ahead(self) -> None:
        """Forget the elements that were fetched ahead."""


class Landing(Transfer):
    """Copies of the current stream so far, into or out of page-locked memory: the program waits for them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._event = nbytes, get_accelerator().awaited_event()
        self._event.record(get_accelerator().current_stream())

    def wait(self) -> None:
        if (event := self._event) is not None:  # the program and the thread of an update may both ask
            event.synchronize()
        self._event = None

    def done(self) -> bool:
        return (event := self._event) is None or bool(event.query())


def round_into(out: torch.Tensor, values: torch.Tensor) -> Transfer:
    """Copy ``values`` into ``out``, but round on the device: torch rounds on the host what travels either way, so
    that fp32 would cross the bus. Into page-locked memory it is under way on return; ``values`` may change at once.
    """
    down = out.device.type == "cpu" != values.device.type
    # what grows on its way down travels as it is
    cast = out.device != values.device and out.dtype != values.dtype and not (down and out.itemsize > values.itemsize)
    beside = down and (cast or out.dtype == values.dtype) and out.is_pinned()
    piece_numel = _PIECE_NUMEL if cast else max(1, values.numel())
    for lo in range(0, values.numel(), piece_numel):
        piece = values[lo : lo + piece_numel]
        if cast:
            piece = piece.to(out.dtype) if down else piece.to(out.device)
        out[lo : lo + piece_numel].copy_(piece, non_blocking=beside)
    return Landing(out.nbytes) if beside else ARRIVED


def nothing(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a stand-in for values that are elsewhere: it reads as not-a-number and refuses to be written."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device="cpu").expand(shape)


def settled(place: TierStore | None, values: torch.Tensor, dtype: torch.dtype) -> TierStore:
    """Return ``place`` with ``values`` in it; for None a store with a copy of them where they are."""
    if place is None:
        return TierStore(values.to(dtype, copy=True))
    place.put(values).wait()
    return place
