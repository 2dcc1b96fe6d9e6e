"""Weights that transformers loads into a model born in shards: each rank reads its own from the file.

transformers hands all weights to the first rank, which copies them into gathered parameters, one module after the
other, to be sent to all (``GatheredParameters(modifier_rank=0)``). While it does, nothing is gathered here; the first
rank notes what is copied from where in which file, and all ranks read that: also of tensors that are stacked or joined
on the way, as those of experts are. What comes from nowhere in a file, as it was converted otherwise, is sent. Private
torch name used here: ``torch._C.DisableTorchFunctionSubclass``.
"""

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.comm import collectives
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.errors import UsageError
from deepspeed.monitor.log import log_dist
from deepspeed.tier.transfer import ARRIVED
from deepspeed.zero.layout import Place
from deepspeed.zero.module.mapped import FilePart, identity_of, parts_of
from deepspeed.zero.plan import StateKind
from deepspeed.zero.regions import Region, Span, runs, spans_of
from deepspeed.zero.unit import Unit, UnitState


class JoinedParts(NamedTuple):
    """Tensor of ``dtype`` and ``shape``, made of parts of files that follow each other along ``dim``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int
    parts: tuple["FilePart | JoinedParts", ...]

    def read(self, out: torch.Tensor, lo: int, place: Place | None = None) -> None:
        """Read as ``FilePart.read``."""
        boxes = place.boxes if place is not None else (((0,) * len(self.shape), self.shape),)
        for at, _, span in spans_of((Region(*box) for box in boxes), lo, lo + out.numel()):
            before = 0
            for part in self.parts:
                start = (*(0 for _ in self.shape[: self.dim]), before, *(0 for _ in self.shape[self.dim + 1 :]))
                before += part.shape[self.dim]
                whole = Span(0, prod(part.shape), Region(start, part.shape))
                for first, inside, numel in runs(self.shape, span, whole):
                    to = at - lo + first - span.lo
                    part.read(out[to : to + numel], inside)


def _joined(func: Any, tensors: Any, dim: Any) -> "JoinedParts | None":
    """Return where the result of ``torch.stack`` or ``torch.cat`` is in files; None where not all of it is."""
    if func not in (torch.stack, torch.cat) or not isinstance(tensors, list | tuple) or not isinstance(dim, int):
        return None
    if not all(isinstance(t, TensorOfFile) and t.unchanged for t in tensors):
        return None
    parts = [t._ds_file for t in tensors]
    if func is torch.stack:
        if dim or not all(isinstance(part, FilePart) for part in parts):
            return None
        parts = [replace(part, shape=(1, *part.shape)) for part in parts]
    first = parts[0]
    rest = {(part.dtype, part.shape[:dim], part.shape[dim + 1 :]) for part in parts}
    if not 0 <= dim < len(first.shape) or len(rest) > 1:
        return None
    size = sum(part.shape[dim] for part in parts)
    return JoinedParts(first.dtype, (*first.shape[:dim], size, *first.shape[dim + 1 :]), dim, tuple(parts))


_ASKS = {"size", "dim", "numel", "is_contiguous", "is_floating_point", "element_size"}  # for no values
_ASKS_OF = {"shape", "dtype", "device", "ndim", "is_meta", "requires_grad", "layout", "_version"}


class TensorOfFile(torch.Tensor):
    """Whole tensor of a state dict; ``copy_`` into a parameter that waits for it only notes the file's part.

    One that is stacked or joined of others gets its values when somebody asks for them.
    """

    _ds_file: Any  # FilePart or JoinedParts
    _ds_before: int  # the version with the values of the file
    _ds_values: Callable[[], torch.Tensor] | None = None  # that are still to be computed

    @classmethod
    def of(cls, values: torch.Tensor, part: Any, compute: Callable[[], torch.Tensor] | None = None) -> "TensorOfFile":
        """Wrap ``values``, which are in a file at ``part``, or will be the result of ``compute``."""
        made = values.as_subclass(cls)
        made._ds_file, made._ds_before, made._ds_values = part, made._version, compute
        return made

    @property
    def unchanged(self) -> bool:
        """Tell whether the tensor has not been written to."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._version == self._ds_before

    def fill(self) -> "TensorOfFile":
        """Compute the values, if that was put off; return the tensor."""
        compute, self._ds_values = self._ds_values, None
        if compute is not None:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                self.copy_(compute())
                self._ds_before = self._version
        return self

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args[1] if func is torch.Tensor.copy_ and len(args) > 1 else None
        if isinstance(given, TensorOfFile) and given.unchanged and args[0].shape == given.shape:
            incoming = incoming_of([args[0]])
            if incoming is not None and incoming.note(args[0], given):
                return args[0]
        options = dict(kwargs or {})
        if args and options.keys() <= {"dim"}:
            dim = args[1] if len(args) == 2 else options.get("dim", 0)
            if (part := _joined(func, args[0], dim)) is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    room = torch.empty(part.shape, dtype=part.dtype, device="cpu")  # costs nothing until it is touched
                    return cls.of(room, part, lambda: func([t.fill() for t in args[0]], dim=dim))
        name = getattr(func, "__name__", "")
        if name not in _ASKS and not (name == "__get__" and func.__self__.__name__ in _ASKS_OF):  # type: ignore[attr-defined]
            for value in (*args, *options.values()):
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, TensorOfFile):
                        tensor.fill()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **options)


def incoming_of(params: Iterable[torch.Tensor]) -> "Incoming | None":
    """Return the load in progress into the shards of all of ``params``, if there is one."""
    loads = {id(i): i for p in params for i in (getattr(_keeper(p), "incoming", None),)}
    return next(iter(loads.values())) if len(loads) == 1 else None


def _keeper(param: torch.Tensor) -> Any:
    return getattr(getattr(param, "_ds_unit", None), "keeper", None)


class Incoming:
    """Load in progress: which parameter is read from which part of a file, and which was sent instead."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        # A module with its own way to load may read what is there, or write to a part of it.
        custom = {p for m in model.modules() if not _loads_plainly(m) for p in m.parameters(recurse=False)}
        self._plain = {p for p in model.parameters() if p not in custom}
        self._open: dict[Unit, int] = {}  # that have memory without values, with the version of the parameter
        self._noted: dict[Unit, FilePart | JoinedParts] = {}
        self.read_bytes = self.sent_bytes = 0

    def wrap(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` with its tensors as TensorOfFile, where every rank sees their files. Collective."""
        tensors = {n: t for n, t in state.items() if isinstance(t, torch.Tensor) and not t.is_meta}
        parts = parts_of(tensors, self._mesh)
        wanted = {part.path: part.identity for part in parts.values()}
        first, *_ = collectives.gather_objects(wanted, self._mesh.zero)
        unseen = collectives.gather_objects([path for path in first if not _sees(path, first[path])], self._mesh.zero)
        nbytes, blind = sum(t.nbytes for t in tensors.values()), [rank for rank, paths in enumerate(unseen) if paths]
        if blind:
            _say(nbytes, f"rank {self._mesh.zero.ranks[blind[0]]} sees no such file as {unseen[blind[0]][0]}")
            return state
        if len(parts) < len(tensors):
            name = next(name for name in tensors if name not in parts)
            _say(nbytes - sum(p.nbytes for p in parts.values()), f"{name} (and others) is not mapped from a file")
        made = copy.copy(state)
        for name, part in parts.items():
            made[name] = TensorOfFile.of(tensors[name], part)
        return made

    def open(self, unit: Unit) -> None:
        """Pin ``unit``, whose values will be written, without gathering them."""
        if unit.state is UnitState.ABSENT and len(unit.params) == 1 and unit.params[0] in self._plain:
            unit.fetch(lambda _: ARRIVED)
            unit.wait(StateKind.PARAM)
            self._open[unit] = unit.params[0]._version
        unit.pin()

    def note(self, param: torch.Tensor, values: TensorOfFile) -> bool:
        """Note that ``param`` takes the file's part of ``values``; False where the values have to be copied now."""
        unit: Unit = param._ds_unit  # type: ignore[attr-defined]
        if unit not in self._open or not any(param is p for p in unit.params):
            return False
        self._noted[unit] = values._ds_file
        return True

    def close(self, params: list[nn.Parameter], modifier: int, send: Callable[[nn.Parameter], None]) -> None:
        """Fill ``params`` with the values of rank ``modifier``: by reading, or with ``send``. Collective."""
        group = self._mesh.zero
        chosen = collectives.gather_objects([self._way(p) for p in params], group)[group.ranks.index(modifier)]
        fault: Exception | None = None
        for param, way in zip(params, chosen, strict=True):
            if way == "sent":
                send(param)
                self.sent_bytes += param.nbytes
            elif isinstance(way, FilePart | JoinedParts) and fault is None:
                try:
                    self._read(param._ds_unit, way)  # type: ignore[attr-defined]
                except (OSError, UsageError) as error:
                    fault = error
        for param in params:
            self._open.pop(param._ds_unit, None)  # type: ignore[attr-defined]
            self._noted.pop(param._ds_unit, None)  # type: ignore[attr-defined]
        if faults := collectives.failures(fault, group):
            rank, text = next(iter(faults.items()))
            raise UsageError(f"rank {rank} cannot read its part of the weights: {text}") from fault

    def _way(self, param: nn.Parameter) -> "FilePart | JoinedParts | str":
        unit: Unit = param._ds_unit  # type: ignore[attr-defined]
        if unit in self._noted:
            return self._noted[unit]
        same = param.data_ptr() == unit.buffer.full.data_ptr() and self._open.get(unit) == param._version
        return "kept" if same else "sent"

    def _read(self, unit: Unit, part: FilePart | JoinedParts) -> None:
        (segment,), (lo, hi) = unit.layout.segments, unit.range_of(StateKind.PARAM)
        first, last = max(lo, segment.offset), min(hi, segment.stop)
        with unit.values(StateKind.PARAM, write=True) as resting:
            if first < last:
                part.read(resting[first - lo : last - lo], first - segment.offset, segment.place)
        unit.new_version()
        self.read_bytes += max(0, last - first) * part.dtype.itemsize


def _loads_plainly(module: nn.Module) -> bool:
    """Tell whether each of its parameters is loaded by one ``copy_`` of all of it, and nothing else."""
    function = getattr(module._load_from_state_dict, "__func__", None)
    return function is nn.Module._load_from_state_dict and not module._load_state_dict_pre_hooks


def _sees(path: str, identity: tuple[Any, ...]) -> bool:
    try:
        return identity_of(path) == identity
    except OSError:
        return False


def _say(nbytes: int, why: str) -> None:
    log_dist(f"the first rank is about to read {nbytes / 1e9:.2f} GB of weights whole and send them to all: {why}")


def follow_transformers() -> None:
    """Route the next load of transformers into a model born in shards through ``Incoming``, if its loader is known.

    Its initialisation of such a model marks modules as initialised on the first rank only; the next one does on all.
    """
    known: dict[str, Callable[..., Any]] = {
        "modeling_utils._load_state_dict_into_zero3_model": _load,
        "integrations.deepspeed.initialize_weights_zero3": _initialise,
    }
    for path, instead in known.items():
        module, _, name = f"transformers.{path}".rpartition(".")
        client = sys.modules.get(module)
        plain = getattr(client, name, None)
        if plain is not None and not hasattr(plain, "__wrapped__"):
            once = functools.partial(_once, functools.partial(setattr, client, name), plain, instead)
            setattr(client, name, functools.update_wrapper(once, plain))


def _once(put: Callable[[Any], None], plain: Any, instead: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    put(plain)
    return instead(plain, *args, **kwargs)


def _load(plain: Callable[..., Any], model: nn.Module, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    keepers = {id(k): k for p in model.parameters() for k in (_keeper(p),)}
    keeper = next(iter(keepers.values())) if len(keepers) == 1 else None
    if keeper is None or not hasattr(keeper, "incoming"):
        return plain(model, state, *args, **kwargs)
    with ExitStack() as after:
        keeper.incoming = incoming = Incoming(model, keeper.mesh)
        after.callback(setattr, keeper, "incoming", None)
        result = plain(model, incoming.wrap(state), *args, **kwargs)
    text = f"each rank read its own shards ({incoming.read_bytes / 1e6:.1f} MB on rank 0)"
    log_dist(text + (f"; {incoming.sent_bytes / 1e6:.1f} MB were sent whole" if incoming.sent_bytes else ""))
    return result


def _initialise(plain: Callable[..., Any], model: nn.Module) -> None:
    plain(model)
    for module in model.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]
