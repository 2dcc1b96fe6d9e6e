"""Logits that are computed where they are read: the vocabulary loss takes them in tiles, and only of rows with a label.

A head that would return large logits returns ``LazyLogits``, which keep the hidden states. Scaling, softcapping, views
and rows of them are lazy, too; ``torch.nn.functional.cross_entropy``, which losses of every model family end in, runs
head and loss tile by tile, and again in the backward; argmax is computed in tiles. Whatever else reads them computes
all of them once, with the weights of that moment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepspeed.accelerator.device import map_tensors
from deepspeed.monitor.log import log_dist
from deepspeed.sequence.tiling.tiles import Surroundings, pieces, tiled
from deepspeed.zero.param import metadata_functions

MIB = 2**20
# Logits of a tile, in fp32. A tile reads and writes the gradient of the whole head, which larger tiles do less often.
# On the CPU it is more than the 32 MiB up to which glibc keeps the memory of freed tensors: several tiles' worth.
TILE_BYTES, DEVICE_TILE_BYTES = 40 * MIB, 512 * MIB
LAZY_FROM = 4  # tiles; below, the logits are no peak
_Step = tuple[Callable[..., torch.Tensor], tuple[Any, ...], dict[str, Any]]


def tile_bytes(device: torch.device) -> int:
    """Return the bytes that one tile may take on ``device``."""
    return TILE_BYTES if device.type == "cpu" else DEVICE_TILE_BYTES


@dataclass(frozen=True)
class _Loss:
    """Cross-entropy of some rows: from what the head returns for them to one loss each."""

    steps: tuple[_Step, ...]
    smoothing: float

    def __call__(self, out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = _after(self.steps, out)
        return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=self.smoothing)

    def gradient(self, out: torch.Tensor, labels: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``out`` [rows, words] from that of the losses; with one more tensor of its size."""
        with torch.enable_grad():
            logits = _after(self.steps, out.requires_grad_())
        of_logits = torch.softmax(logits.detach(), -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        if self.smoothing:
            of_logits -= self.smoothing / of_logits.shape[-1]
        of_logits.scatter_add_(1, labels[:, None], of_logits.new_full((len(labels), 1), self.smoothing - 1))
        of_logits = of_logits.mul_(grad[:, None]).to(logits.dtype)
        return of_logits if logits is out else torch.autograd.grad(logits, out, of_logits)[0]


def _after(steps: Sequence[_Step], value: torch.Tensor) -> torch.Tensor:
    for run, args, kwargs in steps:
        value = run(value, *args, **kwargs)
    return value


class _LinearLoss(torch.autograd.Function):
    """Losses of the rows ``keep`` of ``hidden`` [N, H] under a linear head without a bias, in tiles.

    The gradient of the weight is added up in place, without one of its size for each tile.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: _Loss,
        tiles: int,
        hidden: torch.Tensor,
        keep: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        ctx.loss, ctx.tiles, ctx.weight = loss, pieces(len(keep), tiles), weight
        ctx.surroundings = Surroundings(hidden.device)
        ctx.save_for_backward(hidden, keep, labels)
        losses = []
        for tile in ctx.tiles:
            rows = hidden.index_select(0, keep.narrow(0, *tile))
            losses.append(loss(functional.linear(rows, weight), labels.narrow(0, *tile)))
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (hidden, keep, labels), weight = ctx.saved_tensors, ctx.weight
        needs_hidden, needs_weight = ctx.needs_input_grad[2], ctx.needs_input_grad[5]
        of_hidden = torch.zeros_like(hidden) if needs_hidden else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        of_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        with ctx.surroundings.again():
            for tile in ctx.tiles:
                places = keep.narrow(0, *tile)
                rows = hidden.index_select(0, places)
                out = functional.linear(rows, weight)
                of_out = ctx.loss.gradient(out, labels.narrow(0, *tile), grad.narrow(0, *tile))
                del out
                if of_hidden is not None:
                    of_hidden.index_copy_(0, places, (of_out @ weight).to(hidden.dtype))
                if of_weight is not None and of_out.dtype == rows.dtype == wide:
                    of_weight.addmm_(of_out.t(), rows)
                elif of_weight is not None:
                    of_weight += of_out.t() @ rows
        return None, None, of_hidden, None, None, None if of_weight is None else of_weight.to(weight.dtype)


@dataclass(frozen=True)
class _Request:
    """What a head is asked for, in place of hidden states: all logits of ``hidden`` or, with ``run``, something else.

    It passes through the call of the module, whose hooks gather sharded weights before and watch the result.
    """

    hidden: torch.Tensor
    run: Callable[["LazyHead", torch.Tensor], torch.Tensor]


class LazyHead:
    """The ``forward`` of an output layer ``module``: lazy from some size of the logits on, or ``always``."""

    def __init__(self, module: nn.Module, *, always: bool) -> None:
        self.module, self._always = module, always
        self.forward: Callable[..., torch.Tensor] = module.forward
        weight = module._parameters.get("weight")
        plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
        self._linear = plain and weight is not None and module._parameters.get("bias") is None
        self._logged = False

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return logits, lazy ones where all of them would be large; or what a request asks for."""
        if isinstance(hidden, _Request):
            return hidden.run(self, hidden.hidden)
        other = args or kwargs or not isinstance(hidden, torch.Tensor) or torch.compiler.is_compiling()
        if other or hidden.dim() < 2:
            return self.forward(hidden, *args, **kwargs)
        with torch.no_grad():
            sample = self.forward(hidden.reshape(-1, hidden.shape[-1])[:0])
        rows = hidden.numel() // max(1, hidden.shape[-1])
        tiles = self.tiles(rows, sample.shape[-1], hidden.device)
        if tiles < LAZY_FROM and not self._always:
            return self.forward(hidden)
        if not self._logged and hidden.requires_grad:
            self._logged = True
            size = rows * sample.shape[-1] * 4 / 2**30
            log_dist(
                f"logits of {rows:,} tokens and {sample.shape[-1]:,} words take {size:.1f} GiB in fp32, their gradient "
                f"as much: the loss is computed in {tiles} tiles or less (key sequence.loss)"
            )
        return LazyLogits(self, hidden, (), sample)

    @staticmethod
    def tiles(rows: int, words: int, device: torch.device) -> int:
        """Return the number of tiles of ``rows`` rows of logits."""
        return max(1, min(rows, -(-rows * words * 4 // tile_bytes(device))))

    def ask(self, hidden: torch.Tensor, run: Callable[["LazyHead", torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return ``run(self, hidden)``, run inside a call of the module."""
        out: torch.Tensor = self.module(_Request(hidden, run))
        return out

    def losses(self, loss: _Loss, hidden: torch.Tensor, keep: torch.Tensor, labels: torch.Tensor, words: int) -> Any:
        """Return the losses of the rows ``keep`` of ``hidden``; to be called through ``ask``."""
        tiles = self.tiles(len(keep), words, hidden.device)
        if self._linear:
            return _LinearLoss.apply(loss, tiles, hidden, keep, labels, self.module.weight)
        cut = [hidden.index_select(0, keep), labels]
        params = [*self.module.parameters()]
        return tiled(lambda x, y: loss(self.forward(x), y), cut, dims=[0, 0], tiles=tiles, params=params)


class LazyLogits(torch.Tensor):
    """Logits of ``hidden`` [..., H] under ``head``, after ``steps`` (functions of each value alone)."""

    _head: LazyHead
    _hidden: torch.Tensor
    _steps: tuple[_Step, ...]
    _whole: torch.Tensor | None = None
    _in_graph = False

    def __new__(
        cls, head: LazyHead, hidden: torch.Tensor, steps: tuple[_Step, ...], sample: torch.Tensor
    ) -> "LazyLogits":
        """Make logits of the dtype and the number of words of ``sample``."""
        shape = (*hidden.shape[:-1], sample.shape[-1])
        like: dict[str, Any] = {"dtype": sample.dtype, "device": sample.device}
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(cls, shape, **like)
        made._head, made._hidden, made._steps = head, hidden, steps
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Stay lazy where that is possible; else compute the values, and apply ``func`` to them."""
        kwargs = kwargs or {}
        logits = args[0] if args else kwargs.get("input")
        if func in metadata_functions():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        lazy = _LAZY.get(func)
        if lazy is not None and isinstance(logits, LazyLogits) and logits._whole is None:
            rest = args[1:] if args else ()
            named = kwargs if args else {name: value for name, value in kwargs.items() if name != "input"}
            result = lazy(logits, func, *rest, **named)
            if result is not NotImplemented:
                return result
        return func(*map_tensors(args, _valued), **map_tensors(kwargs, _valued))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute the values for code below torch's functions."""
        return func(*map_tensors(args, _valued), **map_tensors(kwargs or {}, _valued))

    def whole(self) -> torch.Tensor:
        """Return all logits; they are computed at the first call, and again where only now a gradient is wanted."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._whole is None or (torch.is_grad_enabled() and not self._in_graph):
                self._in_graph = torch.is_grad_enabled()
                whole = self._head.ask(self._hidden, lambda head, hidden: head.forward(hidden))
                self._whole = _after(self._steps, whole)
            return self._whole

    def _like(self, hidden: torch.Tensor, *steps: _Step, dtype: torch.dtype | None = None) -> "LazyLogits":
        sample = torch.empty(0, self.shape[-1], dtype=dtype or self.dtype, device=self.device)
        return LazyLogits(self._head, hidden, (*self._steps, *steps), sample)


def _valued(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.whole() if isinstance(tensor, LazyLogits) else tensor


def _each(logits: LazyLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function of each value alone."""
    plain = int | float | torch.dtype | torch.device | str | None
    if not all(isinstance(value, plain) for value in (*args, *kwargs.values())):
        return NotImplemented
    after = func(torch.empty(0, dtype=logits.dtype, device=logits.device), *args, **kwargs)
    if after.device != logits.device:
        return NotImplemented
    return logits._like(logits._hidden, (func, args, kwargs), dtype=after.dtype)


def _viewed(logits: LazyLogits, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a view that leaves the words the last dimension."""
    if args and isinstance(args[0], torch.dtype):
        return NotImplemented
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1]:
        return NotImplemented
    return logits._like(logits._hidden.reshape(*shape[:-1], logits._hidden.shape[-1]))


def _indexed(logits: LazyLogits, func: Any, index: Any) -> Any:
    """Take rows."""
    items = index if isinstance(index, tuple) else (index,)
    fixed = [i for i in items if i is not Ellipsis]
    used = sum(0 if i is None else i.dim() if getattr(i, "dtype", None) == torch.bool else 1 for i in fixed)
    last_is_whole = used < logits.dim() and not (len(fixed) < len(items) and items[-1] is not Ellipsis)
    if not last_is_whole and not (isinstance(items[-1], slice) and items[-1] == slice(None)):
        return NotImplemented
    return logits._like(logits._hidden[index])


def _split(logits: LazyLogits, func: Any, size: Any = None, dim: int = 0, **other: Any) -> Any:
    """Cut into rows."""
    if other or dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    return tuple(logits._like(part) for part in logits._hidden.split(size, dim % logits.dim()))


def _argmax(logits: LazyLogits, func: Any, dim: int | None = None, keepdim: bool = False, **other: Any) -> Any:
    """Choose the likeliest words, in tiles."""
    if other or dim is None or dim % logits.dim() != logits.dim() - 1:
        return NotImplemented
    flat = logits._hidden.detach().reshape(-1, logits._hidden.shape[-1])
    tiles = pieces(len(flat), LazyHead.tiles(len(flat), logits.shape[-1], flat.device))

    def run(head: LazyHead, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([_after(logits._steps, head.forward(rows.narrow(0, *tile))).argmax(-1) for tile in tiles])

    with torch.no_grad():
        chosen = logits._head.ask(flat, run).view(logits.shape[:-1])
    return chosen.unsqueeze(-1) if keepdim else chosen


def _cross_entropy(
    logits: LazyLogits,
    func: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute ``functional.cross_entropy`` in tiles, of rows with a label alone."""
    odd = weight is not None or size_average is not None or reduce is not None or target.is_floating_point()
    if odd or logits.dim() != 2 or target.shape != logits.shape[:1]:
        return NotImplemented
    loss, words = _Loss(logits._steps, label_smoothing), logits.shape[-1]

    def run(head: LazyHead, hidden: torch.Tensor) -> torch.Tensor:
        keep = (target != ignore_index).nonzero().squeeze(1)
        losses: torch.Tensor = head.losses(loss, hidden, keep, target[keep], words)
        if reduction == "none":
            return losses.new_zeros(len(target)).index_copy(0, keep, losses)
        return losses.sum() / len(keep) if reduction == "mean" else losses.sum()

    return logits._head.ask(logits._hidden, run)


_FUNCTIONS = ("mul", "div", "add", "sub", "neg", "tanh")
_METHODS = ("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__", "true_divide")
_CASTS = ("float", "double", "half", "bfloat16", "to")
_LAZY: dict[Any, Callable[..., Any]] = {
    **{getattr(torch.Tensor, name): _each for name in (*_FUNCTIONS, *_METHODS, *_CASTS)},
    **{getattr(torch, name): _each for name in _FUNCTIONS},
    torch.Tensor.contiguous: lambda logits, func: logits,
    torch.Tensor.view: _viewed,
    torch.Tensor.reshape: _viewed,
    torch.Tensor.flatten: _viewed,
    torch.reshape: _viewed,
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.split: _split,
    torch.split: _split,
    torch.Tensor.argmax: _argmax,
    torch.argmax: _argmax,
    functional.cross_entropy: _cross_entropy,
}
