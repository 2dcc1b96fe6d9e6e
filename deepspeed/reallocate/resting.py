"""Which elements of which tensors rest on this rank, whatever the layout, and views of them."""

import contextlib
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch

from deepspeed.comm.collectives import AxisGroup
from deepspeed.errors import UsageError
from deepspeed.zero.layout import Place, Segment
from deepspeed.zero.module.state import segment_of
from deepspeed.zero.param import local_of, place_of
from deepspeed.zero.plan import StateKind
from deepspeed.zero.regions import Region, Span
from deepspeed.zero.unit import Unit

_OPEN_AT_ONCE = 4  # shards of drives in memory

_Spot = tuple[Span, int]  # what rests here, and the index in the local tensor where it begins


class FlowTensor(NamedTuple):
    """Whole tensor, and the spans of it that rest on one rank."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class RestingWeights:
    """Resting parts of ``tensors``, this rank's parameters and buffers by name: ``entries``, and views of them.

    ``write``: writes to the views count. Views are valid until ``close``.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, write: bool = False) -> None:
        self._tensors, self._write = tensors, write
        self._opened: dict[Unit, tuple[contextlib.AbstractContextManager[torch.Tensor], torch.Tensor]] = {}
        self._at: dict[str, list[_Spot]] = {}
        self.entries: dict[str, FlowTensor] = {}
        for name, tensor in tensors.items():
            dtype, shape, self._at[name] = _at_rest(name, tensor)
            self.entries[name] = FlowTensor(dtype, shape, tuple(span for span, _ in self._at[name]))

    def span(self, name: str, span: Span) -> torch.Tensor:
        """Return the elements of one of the entry's spans, flat."""
        lo = next(at - ours.lo for ours, at in self._at[name] if ours.region == span.region) + span.lo
        return self._flat(name, lo, lo + span.hi - span.lo)

    def region(self, name: str, region: Region) -> torch.Tensor:
        """Return the ``region`` of the global tensor, in its shape; all of it lies in one span."""
        for ours, at in self._at[name]:
            origin, shape = ours.region or Region((0,) * len(region.start), self.entries[name].shape)
            strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
            first = sum((s - o) * stride for s, o, stride in zip(region.start, origin, strides, strict=True))
            last = first + sum((n - 1) * stride for n, stride in zip(region.shape, strides, strict=True))
            ends = zip(region.start, region.shape, origin, shape, strict=True)
            if ours.lo <= first and last < ours.hi and all(o <= s and s + n <= o + m for s, n, o, m in ends):
                flat = self._flat(name, at + first - ours.lo, at + last + 1 - ours.lo)
                return flat.as_strided(region.shape, strides)
        raise AssertionError(f"{region} of {name} does not rest here")

    def _flat(self, name: str, lo: int, hi: int) -> torch.Tensor:
        """Return elements [lo, hi) of the local tensor."""
        tensor = self._tensors[name]
        unit: Unit | None = getattr(tensor, "_ds_unit", None)
        if unit is None:
            local = local_of(tensor.detach())
            assert not self._write or local.is_contiguous(), name
            return local.reshape(-1)[lo:hi]
        at = segment_of(tensor).offset - unit.range_of(StateKind.PARAM)[0]
        return self._open(unit)[at + lo : at + hi]

    def _open(self, unit: Unit) -> torch.Tensor:
        if unit not in self._opened:
            on_nvme = [u for u in self._opened if u.on_drive(StateKind.PARAM)]
            if unit.on_drive(StateKind.PARAM) and len(on_nvme) == _OPEN_AT_ONCE:
                self._opened.pop(on_nvme[0])[0].__exit__(None, None, None)
            context = unit.values(StateKind.PARAM, write=self._write)
            self._opened[unit] = context, context.__enter__().detach()
        return self._opened[unit][1]

    def close(self) -> None:
        """Write changed values back to where they rest, and end the views."""
        with contextlib.ExitStack() as rest:
            for context, _ in self._opened.values():
                rest.push(context)
            self._opened = {}


def _at_rest(name: str, tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], list[_Spot]]:
    """Return the dtype at rest, the global shape, and what rests here. UsageError for some DTensors."""
    if (unit := getattr(tensor, "_ds_unit", None)) is not None:
        segment = segment_of(tensor)
        return unit.shard.dtype, segment.whole_shape, _spots(segment, *unit.range_of(StateKind.PARAM))
    if hasattr(tensor, "placements"):  # a DTensor of the client's
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        if mesh.ndim != 1 or any(p.is_partial() for p in tensor.placements):
            raise UsageError(
                f"{name} is a DTensor {tensor.placements} over a mesh of {tuple(mesh.shape)} ranks; only such over one "
                "axis of a mesh, in parts or replicated, can be moved"
            )
        place: Place = place_of(tensor, name, AxisGroup(None, mesh.size(), mesh.get_local_rank(0), (), ""))  # type: ignore[arg-type]
        return tensor.dtype, place.shape, _spots(Segment(name, place.size, 0).at(place))
    part = getattr(tensor, "tp_place", None)
    if isinstance(part, Place) and tuple(tensor.shape) == part.size:  # which an engine has left
        return tensor.dtype, part.shape, _spots(Segment(name, part.size, 0).at(part))
    return tensor.dtype, tuple(tensor.shape), _spots(Segment(name, tuple(tensor.shape), 0))


def _spots(segment: Segment, start: int = 0, stop: int | None = None) -> list[_Spot]:
    """Return the spans of the global tensor in the flat range [start, stop), and where each begins in the local one."""
    spans = segment.spans(start, segment.stop if stop is None else stop)
    return [(span, lo - segment.offset) for lo, _, span in spans]
