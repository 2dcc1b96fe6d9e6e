"""What a parameter is: its local tensor, where that points, and its face while its values are released.

Only this file writes ``.data`` and ``__class__`` of tensors. A DTensor (tensor parallelism) is packed by its local
tensor, and that is what is re-pointed: ``.data`` of a DTensor would replace tensor and placement both.

[Note: released face] A released parameter's storage is shrunk to zero bytes while every view of it stays alive, so
refilling it makes all of them valid again. Reading such a view on the CPU would crash the process, so the object that
users see leaves that storage for a NaN scalar spread over its logical shape, and its ``__class__`` is swapped to a
subclass whose ``__torch_function__`` answers metadata, fetches the unit on demand while a module of the same runtime
runs its forward, and otherwise refuses (docs/architecture.md, section 9). Private torch names used here:
``torch._C.DisableTorchFunctionSubclass``, ``torch._weight_norm``, ``torch._C._storage_Use_Count`` (views of a storage).
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deepspeed.comm.collectives import AxisGroup, sum_in_place
from deepspeed.errors import ReleasedParameterError, UsageError
from deepspeed.zero.layout import Place, Segment
from deepspeed.zero.plan import StateKind

# fmt: off
_PROPERTIES = [
    "shape", "dtype", "device", "layout", "requires_grad", "grad", "ndim", "is_leaf", "grad_fn", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps", "output_nr", "_version",
    "_backward_hooks", "itemsize", "nbytes", "names", "retains_grad",
]
_METHODS = [
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__len__", "get_device", "__hash__",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "retain_grad", "is_inference", "has_names",
    "is_pinned", "is_shared", "is_same_size",
]
_FUNCTIONS = [
    "numel", "is_floating_point", "is_complex", "get_device", "empty_like", "zeros_like", "ones_like", "full_like",
    "rand_like", "randn_like", "is_tensor", "is_nonzero_shape", "is_same_size", "result_type",
    "_has_compatible_shallow_copy_type",
]
# fmt: on


@functools.cache
def metadata_functions() -> frozenset[Any]:
    """Return the functions that read only metadata and therefore work on a released parameter."""
    properties = [inspect.getattr_static(torch.Tensor, name, None) for name in _PROPERTIES]
    functions = {getattr(p, verb, None) for p in properties for verb in ("__get__", "__set__", "__delete__")}
    functions.update(getattr(torch.Tensor, name, None) for name in _METHODS)
    functions.update(getattr(torch, name, None) for name in _FUNCTIONS)
    # Differentiating with respect to a released parameter is no read of it: the backward gathers what it needs.
    functions.update((torch.autograd.grad, torch.autograd.backward))
    return frozenset(functions - {None})


# ``view_as(itself)`` leads to the node where autograd accumulates, which split backwards look for.
_DATA = inspect.getattr_static(torch.Tensor, "data")
_ALIASES = (torch.Tensor.detach, torch.detach, torch.Tensor.view_as, _DATA.__get__)
_STRIDES = (torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset)
_MOVES = tuple(getattr(torch.Tensor, name) for name in ("to", "cuda", "cpu", "float", "half", "bfloat16"))
_MOVES += (nn.functional.pad,)
_COPIES = (*_MOVES, torch.Tensor.numpy, torch._weight_norm)


class ZeroParamStatus(Enum):
    """Status constants that clients compare ``param.ds_status`` with."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def is_hollow(tensor: torch.Tensor) -> bool:
    """Tell whether values are absent: released, being fetched, or an alias. Waits for a pending update."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.numel() == 0:
            return False
    unit = getattr(tensor, "_ds_unit", None)
    if unit is not None and not unit.movable:
        unit.wait(StateKind.PARAM)
    return isinstance(tensor, ReleasedTensor) or unit is None or not unit.whole


class ReleasedFace:
    """Mixin of every released class; see [Note: released face]. ``_ds_unit`` on the object leads to its unit."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Before torch 2.13 a collective asks for metadata here, and then reads the memory past this method.
        collective = sys._getframe(1).f_globals.get("__name__", "").endswith(".distributed_c10d")
        with torch._C.DisableTorchFunctionSubclass():
            if func in metadata_functions() and not collective:
                return func(*args, **kwargs)
            if func in _STRIDES:
                plain = torch.empty_like(args[0], device="meta", memory_format=torch.contiguous_format)
                return func(plain, *args[1:], **kwargs)
            hollow = [t for t in _released_arguments((*args, *kwargs.values())) if is_hollow(t)]
            if not hollow:
                return func(*args, **kwargs)
            if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
                return _describe(hollow[0])
            unit = getattr(hollow[0], "_ds_unit", None)
            if func in _ALIASES and not (unit is not None and unit.may_fetch_on_demand()):
                made = func(*args, **kwargs)
                made.__class__ = _alias_class(made.__class__)
                made._ds_unit, made._ds_name = unit, getattr(hollow[0], "_ds_name", "")
                made._ds_of = getattr(hollow[0], "_ds_of", hollow[0])
                return made
            if func in _MOVES and _is_no_move(func, hollow[0], args, kwargs):
                return args[0]
            if func == _DATA.__set__ and args[0] is getattr(args[1], "_ds_of", args[1]):
                return None  # the second half of ``module.to(...)`` when the first changed nothing
            if func in _COPIES and all(_may_copy(func, t) for t in hollow):
                return _on_whole(func, hollow, args, kwargs)
        for tensor in hollow:
            owner = getattr(tensor, "_ds_unit", None)
            if owner is None or isinstance(tensor, ReleasedTensor) or not owner.fetch_on_demand():
                raise refusal("a collective" if collective else func, tensor)
        if costly := [t for t in hollow if is_hollow(t)]:  # fetching the later ones has cost these their place
            raise refusal(func, costly[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @property
    def ds_tensor(self) -> torch.Tensor:
        """Return this rank's shard as of the last update; AttributeError where parameters are not sharded."""
        if (values := self.__dict__.get("ds_tensor")) is None:
            raise AttributeError("ds_tensor is there where parameters are sharded")
        self.__dict__["_ds_unit"].wait(StateKind.PARAM)
        return cast(torch.Tensor, values)

    @ds_tensor.setter
    def ds_tensor(self, values: torch.Tensor) -> None:
        self.__dict__["ds_tensor"] = values

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        hollow = is_hollow(cast(torch.Tensor, self))  # torch asks for the class first, which may be another one then
        unit = getattr(self, "_ds_unit", None)
        # Before there is an engine all ranks build the model, so all of them copy this part of it: into shards, too.
        if hollow and isinstance(self, nn.Parameter) and unit is not None and getattr(unit.keeper, "building", False):
            made = _on_whole(copy.deepcopy, [self], (self, memo), {})  # of the plain class, so an ordinary parameter
            return unit.keeper.cut_copy(made, unit)
        return super().__deepcopy__(memo) if isinstance(self, ReleasedFace) else copy.deepcopy(self, memo)  # type: ignore[misc]


class ReleasedTensor(ReleasedFace, torch.Tensor):
    """Result of ``detach()`` or ``.data`` on a released parameter (``state_dict`` entries, for example)."""

    _ds_of: torch.Tensor  # that parameter


@functools.cache
def released_class(base: type) -> type:
    """Return the released twin of a parameter class; instances swap to it and back."""
    names = [name for name in ("to_local", "full_tensor", "redistribute") if hasattr(base, name)]

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of DTensor that reads its local tensor past ``__torch_function__``: send it through that."""
        return lambda self, *args, **kwargs: ReleasedFace.__torch_function__(method, (), (self, *args), kwargs)

    reads = {name: guarded(getattr(base, name)) for name in names}
    return type(f"Released{base.__name__}", (ReleasedFace, base), {"_ds_visible_class": base, **reads})


@functools.cache
def _alias_class(base: type) -> type:
    return ReleasedTensor if base is torch.Tensor else type(f"Released{base.__name__}", (ReleasedTensor, base), {})


def requiring(params: Sequence[torch.Tensor]) -> list[int]:
    """Return positions of ``params`` that require a gradient; bypasses released faces, as it runs every backward."""
    with torch._C.DisableTorchFunctionSubclass():
        return [position for position, param in enumerate(params) if param.requires_grad]


def storage_uses(flat: torch.Tensor) -> int:
    """Count the tensors that share the storage of ``flat``, including those that autograd has saved."""
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``tensor`` on this rank: a DTensor's local tensor, any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def castable(dtype: torch.dtype) -> bool:
    """Tell whether values may change precision: 8-bit floats are codes that mean nothing without their scales."""
    return dtype.is_floating_point and dtype.itemsize > 1


def is_composed(tensor: torch.Tensor) -> bool:
    """Tell whether ``tensor`` wraps other tensors (as torchao's) and has no memory to be cut; no DTensor does."""
    return not hasattr(tensor, "_local_tensor") and bool(is_traceable_wrapper_subclass(tensor))


_DEEPEST = 4
Piece = tuple[str, torch.Tensor, Callable[[torch.Tensor], None]]  # path, tensor, and what puts another in its place


def pieces_of(parameter: torch.Tensor) -> Iterator[Piece]:
    """Yield the tensors beside its own memory that the values of a frozen ``parameter`` depend on, each once.

    For a composed one: the tensors it wraps. For codes (whole numbers, 8-bit floats): tensors on its attributes, as
    scales, in objects, dicts and lists down to four levels. Modules and parameters are not entered.
    """
    if is_composed(parameter):
        yield from _composing(parameter)
    elif not parameter.requires_grad and not castable(parameter.dtype):
        ours = parameter.__dict__.get("_ds_marks", ())
        yield from _within({k: v for k, v in vars(parameter).items() if k not in ours}, vars(parameter), set())


def _composing(tensor: Any, path: str = "") -> Iterator[Piece]:
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if is_composed(inner):
            yield from _composing(inner, f"{path}{name}.")
        else:
            yield f"{path}{name}", inner, functools.partial(setattr, tensor, name)


def _within(items: Any, holder: Any, seen: set[int], path: str = "") -> Iterator[Piece]:
    """Yield tensors in the dict or list ``items``, and in its values, to ``_DEEPEST``; ``holder`` stores them."""
    for key, value in list(items.items() if isinstance(items, dict) else enumerate(items)):
        if isinstance(value, nn.Module | nn.Parameter | type) or id(value) in seen or path.count(".") == _DEEPEST:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield f"{path}{key}", value, functools.partial(holder.__setitem__, key)
        elif isinstance(value, dict | list):
            yield from _within(value, value, seen, f"{path}{key}.")
        elif isinstance(inside := getattr(value, "__dict__", None), dict):
            yield from _within(inside, inside, seen, f"{path}{key}.")


def move_composed(parameter: nn.Parameter, device: torch.device) -> None:
    """Move a composed ``parameter``, which keeps its identity, to ``device``."""
    if is_composed(parameter) and parameter.device != device:
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(device), requires_grad=False))


def place_of(parameter: nn.Parameter, name: str, tp: AxisGroup) -> Place:
    """Return the position of this rank's part of ``parameter`` in the global tensor, shared over the ranks of ``tp``.

    A layer of ``deepspeed.tensor`` has it in ``tp_place``, a DTensor in its placements, a module of Megatron's kind in
    ``tensor_model_parallel`` and ``partition_dim``. Others are whole on every rank. UsageError for another mesh.
    """
    place, whole = getattr(parameter, "tp_place", None), cast(Any, parameter)
    local = tuple(local_of(parameter).shape)
    if isinstance(place, Place):
        return place
    if hasattr(parameter, "placements"):
        cut = [p.dim for p in whole.placements if p.is_shard()]
        if len(whole.placements) != 1 or whole.device_mesh.size() != tp.size:
            raise UsageError(
                f"parameter {name!r} is a DTensor over a mesh of {tuple(whole.device_mesh.shape)} ranks, but "
                f"{tp.size} share each layer; distribute it over the tensor-parallel ranks alone and leave the "
                "sharding over data-parallel ranks to zero_optimization.stage"
            )
        starts = [min(n, tp.index * -(-n // tp.size)) if d in cut else 0 for d, n in enumerate(parameter.shape)]
        return Place(((tuple(starts), local),), local, tuple(parameter.shape), copies=1 if cut else tp.size)
    flags = ("tensor_model_parallel", "model_parallel")
    if tp.size == 1 or not any(getattr(parameter, flag, False) is True for flag in flags):
        return Place((((0,) * len(local), local),), local, local, copies=tp.size)
    dim = max(0, getattr(parameter, "partition_dim", 0))
    starts = [tp.index * n if d == dim else 0 for d, n in enumerate(local)]
    return Place(((tuple(starts), local),), local, tuple(n * tp.size if d == dim else n for d, n in enumerate(local)))


def shape_on_rank(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of this rank's part, even while the parameter is still whole."""
    place = getattr(parameter, "tp_place", None)
    return place.size if isinstance(place, Place) else tuple(local_of(parameter).shape)


def part_of(whole: torch.Tensor, place: Place) -> torch.Tensor:
    """Return this rank's part, in its shape, of the global tensor."""
    cuts = [tuple(slice(s, s + n) for s, n in zip(*box, strict=True)) for box in place.boxes]
    if len(cuts) == 1:
        return whole[cuts[0]]
    return torch.cat([whole[cut].reshape(-1) for cut in cuts]).view(place.size)


def whole_of(part: torch.Tensor, place: Place | None, tp: AxisGroup) -> torch.Tensor:
    """Return the global tensor from the parts of the ranks of ``tp``; without a ``place``, ``part``. Collective."""
    if place is None or place.copies == tp.size:
        return part
    whole, flat = part.new_zeros(place.shape), part.reshape(-1)
    sizes = [prod(shape) for _, shape in place.boxes]
    for (start, shape), values in zip(place.boxes, flat.split(sizes), strict=True):
        whole[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))] = values.view(shape)
    return sum_in_place(whole, tp)


def keep_view(param: torch.Tensor, full: torch.Tensor, segment: Segment) -> bool:
    """Point ``param`` at its ``segment`` of ``full``; tell whether it was elsewhere. A frozen one that was given other
    memory (by bitsandbytes as it computes, as averages) has its values copied; any other raises UsageError.
    """
    local = local_of(param)
    if local.data_ptr() == full.data_ptr() + segment.offset * full.element_size():
        return False
    inside, name = full[segment.offset : segment.stop].view(segment.shape), segment.name
    same = local.dtype is inside.dtype and local.shape == inside.shape and local.device == inside.device
    # What others see, too, would no longer be what they see.
    shared = castable(param.dtype) and storage_uses(local) > storage_uses(torch.empty(1))
    if param.requires_grad or shared or is_composed(param) or not same:
        raise UsageError(
            f"{name!r} was given other data, resized, moved or cast after deepspeed.initialize (now {param.dtype}, "
            f"{param.device}), so the optimizer would no longer update it. Choose all that before, or call "
            "engine.destroy() and initialize again; to write values use param.copy_(...) under torch.no_grad()"
        )
    with torch.no_grad():
        inside.copy_(local)
    point(param, inside)
    return True


def point(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Point ``tensor`` (a DTensor: its local tensor), which keeps its identity, at ``values``."""
    if hasattr(tensor, "_local_tensor"):
        tensor._local_tensor = values
    else:
        tensor.data = values


def take_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Remove and return the parameter's gradient on this rank (or None), dense and laid out as the parameter is.

    A DTensor's gradient that is partial over the tensor-parallel ranks is summed first: each of them must call this.
    """
    grad: Any = parameter.grad
    parameter.grad = None
    if grad is not None and hasattr(grad, "_local_tensor"):
        wanted = parameter.placements  # type: ignore[attr-defined]
        grad = (grad if grad.placements == wanted else grad.redistribute(placements=wanted))._local_tensor
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def owners(grad: torch.Tensor) -> tuple[int, int, int, bool]:
    """Count the owners of ``grad``: tensors over its storage, references to it and to the storage, and whether torch
    alone knows of its memory (False where numpy or another reader has it): see `usual_owners`.
    """
    storage = grad.untyped_storage()
    return storage_uses(grad), sys.getrefcount(grad), sys.getrefcount(storage), storage.resizable()


@functools.cache
def usual_owners() -> tuple[int, int, int, bool]:
    """Return `owners` for a gradient that a hook has just taken and nobody else holds, measured by a trial."""
    seen: list[tuple[int, int, int, bool]] = []

    def hook(parameter: torch.Tensor) -> None:
        grad = take_gradient(cast(nn.Parameter, parameter))
        assert grad is not None
        seen.append(owners(grad))

    with torch.inference_mode(mode=False), torch.enable_grad():
        parameter = nn.Parameter(torch.zeros(2, device="cpu"))
        parameter.register_post_accumulate_grad_hook(hook)
        (parameter * 2.0).sum().backward()
    return seen[0]


def gradient_like(parameter: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (the local part of a gradient) in the form that ``.grad`` of the parameter accepts."""
    if not hasattr(parameter, "_local_tensor"):
        return values
    whole: Any = parameter
    options = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return whole.from_local(values, whole.device_mesh, whole.placements, **options)


def hide(parameters: Sequence[nn.Parameter], void: torch.Tensor) -> None:
    """Give ``parameters`` the released face over the scalar ``void``, spread over the logical shapes."""
    for parameter in parameters:
        if isinstance(parameter, ReleasedFace):
            continue
        point(parameter, void.expand(local_of(parameter).shape))
        parameter.__class__ = released_class(type(parameter))
        if not getattr(parameter, "ds_persist", True):
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]


def expose(parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    """Give ``parameters`` their own classes back, each over its ``values``."""
    for parameter, shown in zip(parameters, values, strict=True):
        if isinstance(parameter, ReleasedFace):
            parameter.__class__ = type(parameter)._ds_visible_class  # type: ignore[attr-defined]
            if not getattr(parameter, "ds_persist", True):
                parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        point(parameter, shown)


def written_gradients(parameters: list[nn.Parameter]) -> list[int]:
    """Return the positions of parameters with a ``.grad``, in one query without dispatch for each."""
    with torch._C.DisableTorchFunctionSubclass():
        return [i for i, p in enumerate(parameters) if p.grad is not None]


def _released_arguments(arguments: Iterable[Any]) -> Iterator[Any]:
    for item in arguments:
        if isinstance(item, ReleasedFace):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _released_arguments(item)


def _is_no_move(func: Callable[..., Any], tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether ``.to(...)`` and the like ask for the dtype and device that the parameter has anyway.

    Without grad mode a mere change of device counts too: that is ``module.cpu()`` or ``module.to(device)``, by which
    trainers take a model down. The shards stay where they are, and reading the result goes on being refused.
    """
    if func is nn.functional.pad:  # by nothing: so are biases fitted to tied weights
        return not any(args[1])
    if kwargs.get("copy"):
        return False
    probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    try:
        moved = func(probe, *args[1:], **kwargs)
    except (RuntimeError, TypeError, AssertionError):
        return False
    return bool(moved.dtype == probe.dtype and (moved.device == probe.device or not torch.is_grad_enabled()))


def _may_copy(func: Callable[..., Any], tensor: Any) -> bool:
    """Tell whether all ranks build a model and want values, as for a hash of a ``state_dict`` or a weight norm."""
    wanted = isinstance(tensor, ReleasedTensor) or func is torch._weight_norm  # ``module.to`` wants another parameter
    building = getattr(getattr(tensor._ds_unit, "keeper", None), "building", False)
    return wanted and building and not (tensor.requires_grad and torch.is_grad_enabled())


def _on_whole(func: Callable[..., Any], hollow: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what ``func``, whose result shares no memory, makes of whole values. Collective."""
    with ExitStack() as pins, torch._C.DisableTorchFunctionSubclass():
        for tensor in hollow:
            tensor._ds_unit.pin()
            pins.callback(tensor._ds_unit.unpin)
        whole = (a._ds_of.detach().clone() if isinstance(a, ReleasedTensor) else a for a in args)
        return func(*whole, **kwargs)


def _describe(tensor: torch.Tensor) -> str:
    kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Tensor"
    facts = f"shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={str(tensor.device)!r}"
    name = getattr(tensor, "_ds_name", "")
    return f"{kind} (values sharded over ranks, not here), {name=}, {facts}, requires_grad={tensor.requires_grad}"


def refusal(func: Callable[..., Any] | str, tensor: torch.Tensor) -> ReleasedParameterError:
    name = getattr(tensor, "_ds_name", "") or "<unnamed>"
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(tensor.shape)
    return ReleasedParameterError(
        f"the values of parameter {name!r} (shape {shape}) are sharded over the ranks and not gathered here, so "
        f"{getattr(func, '__name__', func)} cannot read or write them. Gather them first, on every rank: "
        f"`with deepspeed.zero.GatheredParameters(param, modifier_rank=0): ...` (modifier_rank=None to read only); "
        f"for whole-model weights use engine.save_16bit_model() or GatheredParameters(model.parameters())"
    )
