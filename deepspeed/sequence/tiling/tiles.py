"""Work on a long sequence in tiles, recomputed one by one in the backward (ALST, Bekman et al. 2025, section 3.1).

A function that treats every position alike needs its intermediate values for one tile at a time only. Forward keeps the
inputs; backward runs the function again, tile by tile. Parameters are inputs of one autograd node, so that each gets
one gradient in a backward, summed over the tiles in fp32 and rounded once, whatever ZeRO does with it then. Parameters
that are sharded are gathered before the first tile and held until the last: no tile communicates, and ranks may have
different numbers of tiles.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from deepspeed.errors import UsageError
from deepspeed.tensor.layers import RandomStates

Reduction = Literal["mean", "sum"]
Compute = Callable[..., torch.Tensor]


def pieces(length: int, tiles: int) -> list[tuple[int, int]]:
    """Return (start, length) of ``tiles`` nearly equal tiles, none of them empty; one where ``length`` is 0."""
    tiles = max(1, min(tiles, length))
    edges = [length * tile // tiles for tile in range(tiles + 1)]
    return [(start, stop - start) for start, stop in zip(edges, edges[1:], strict=False)]


@contextlib.contextmanager
def gathered(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Gather sharded ``params`` and hold them inside, where modules that own them run without communication."""
    units = {id(unit): unit for p in params if (unit := getattr(p, "_ds_unit", None)) is not None}
    by_keeper: dict[Any, list[Any]] = {}
    for unit in units.values():
        by_keeper.setdefault(unit.keeper, []).append(unit)
    with contextlib.ExitStack() as stack:
        for keeper, some in by_keeper.items():
            if hasattr(keeper, "repeated"):
                stack.enter_context(keeper.repeated(some))
        yield


class Surroundings:
    """Random state and autocast of a forward, for its recomputation."""

    def __init__(self, device: torch.device) -> None:
        kind = self._kind = device.type
        self._cast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
        self._states = RandomStates.now()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run what is inside as the forward ran, and leave the random state as it was."""
        now = RandomStates.now()
        self._states.set()
        dtype, enabled, cache = self._cast
        try:
            with torch.autocast(self._kind, dtype=dtype, enabled=enabled, cache_enabled=cache):
                yield
        finally:
            now.set()


class Sum:
    """Sum of gradients of one tensor, in fp32 for narrower ones; ``result`` rounds it once."""

    def __init__(self, like: torch.Tensor) -> None:
        self._dtype = like.dtype
        self._wide = torch.promote_types(like.dtype, torch.float32)
        self.total: torch.Tensor | None = None

    def add(self, grad: torch.Tensor | None) -> None:
        """Add the gradient of one tile."""
        if grad is not None and self.total is None:
            self.total = grad.to(self._wide, copy=True)  # a copy: autograd may have given it to others, too
        elif grad is not None:
            self.total.add_(grad)  # type: ignore[union-attr]

    def result(self, like: torch.Tensor) -> torch.Tensor:
        """Return the sum; zeros where no tile had a gradient, as ranks wait for each other's."""
        return torch.zeros_like(like) if self.total is None else self.total.to(self._dtype)


@dataclass
class _TiledWork:
    """What is done with each tile: ``run(*tiles, *whole)``, where tile i is cut from tensor i along ``dims[i]``."""

    run: Compute
    dims: tuple[int, ...]
    tiles: list[tuple[int, int]]
    join: int = 0  # dimension along which outputs of tiles are joined
    reduction: Reduction | None = None  # else
    params: list[torch.Tensor] = field(default_factory=list)

    def cut(self, tensors: Sequence[torch.Tensor], tile: tuple[int, int]) -> list[torch.Tensor]:
        """Return the inputs of a tile, contiguous as those of the whole are."""
        cut = [tensor.narrow(dim, *tile).contiguous() for tensor, dim in zip(tensors, self.dims, strict=False)]
        return cut + list(tensors[len(self.dims) :])

    @property
    def length(self) -> int:
        """Return the number of positions of all tiles."""
        return sum(self.tiles[-1])

    def share(self, tile: tuple[int, int]) -> float:
        """Return the weight of a tile's scalar in the result: its share of the positions for a mean."""
        return tile[1] / self.length if self.reduction == "mean" and self.length else 1.0


def _checked(output: Any, work: _TiledWork, tile: tuple[int, int]) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise UsageError(
            f"a tiled function has to return one tensor, and {_name(work.run)} returned a {type(output).__name__}; "
            "wrap it in a function that does"
        )
    joins = output.shape[work.join : work.join + 1] == (tile[1],)
    if not (joins if work.reduction is None else output.dim() == 0):
        raise UsageError(
            f"{_name(work.run)} returned a tensor of shape {tuple(output.shape)} for a tile of {tile[1]} positions: "
            "output_reduction 'mean' or 'sum' is for scalars, None joins these along output_unshard_dimension"
        )
    return output


def _name(run: Any) -> str:
    while isinstance(run, functools.partial):
        run = run.func
    return getattr(run, "__qualname__", type(run).__name__)


class _Tiled(torch.autograd.Function):
    """Node of a tiled function; inputs: the cut tensors, those that tiles see whole, the parameters."""

    @staticmethod
    def forward(ctx: Any, work: _TiledWork, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.work, ctx.surroundings = work, Surroundings(tensors[0].device)
        work.params = list(tensors[count:])
        inputs = tensors[:count]
        ctx.save_for_backward(*inputs)
        ctx.needs = [tensor.requires_grad for tensor in inputs]
        scalars: list[torch.Tensor] = []
        joined: torch.Tensor | None = None
        with gathered(work.params):
            for tile in work.tiles:
                out = _checked(work.run(*work.cut(inputs, tile)), work, tile)
                if work.reduction is not None:
                    scalars.append(out * work.share(tile))
                    continue
                if joined is None:  # one tensor, as joining a list would hold all of it twice
                    shape = list(out.shape)
                    shape[work.join] = work.length
                    joined = out.new_empty(shape)
                joined.narrow(work.join, *tile).copy_(out)
        return torch.stack(scalars).sum(0) if joined is None else joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        work, inputs = ctx.work, ctx.saved_tensors
        grads = _Gradients(work, inputs, ctx.needs)
        with gathered(work.params), ctx.surroundings.again(), torch.enable_grad():
            for tile in work.tiles:
                pairs = zip(work.cut(inputs, tile), ctx.needs, strict=True)
                leaves = [tensor.detach().requires_grad_(need) for tensor, need in pairs]
                out = work.run(*leaves)
                part = grad * work.share(tile) if work.reduction else grad.narrow(work.join, *tile)
                if out.requires_grad:
                    grads.take(tile, leaves, out, part)
        return None, None, *grads.of_inputs(), *grads.of_params()


class _Gradients:
    """Gradients of a tiled function, as the tiles bring them."""

    def __init__(self, work: _TiledWork, inputs: Sequence[torch.Tensor], needs: Sequence[bool]) -> None:
        self._work, self._inputs, self._needs = work, inputs, needs
        self._params = {p: Sum(p) for p in work.params if p.requires_grad}
        self._unlisted: dict[torch.Tensor, Sum] = {}
        count = len(work.dims)
        self._cut = {i: torch.zeros_like(inputs[i]) for i in range(count) if needs[i]}
        self._whole = {i: Sum(inputs[i]) for i in range(count, len(inputs)) if needs[i]}

    def take(self, tile: tuple[int, int], leaves: list[torch.Tensor], output: torch.Tensor, grad: torch.Tensor) -> None:
        """Compute the gradients of a tile from that of its ``output``."""
        more = _unlisted(output, {*self._params, *leaves})
        sums = self._params | {p: self._unlisted.setdefault(p, Sum(p)) for p in more}
        needed = [i for i, need in enumerate(self._needs) if need]
        wanted = [*(leaves[i] for i in needed), *sums]
        with _without_hooks(sums):
            values = torch.autograd.grad(output, wanted, grad, allow_unused=True)
        for i, value in zip(needed, values, strict=False):
            if i in self._whole:
                self._whole[i].add(value)
            elif value is not None:
                self._cut[i].narrow(self._work.dims[i], *tile).copy_(value)
        for total, value in zip(sums.values(), values[len(needed) :], strict=True):
            total.add(value)

    def of_inputs(self) -> list[torch.Tensor | None]:
        """Return the gradient of each input, or None."""
        whole = {i: total.result(self._inputs[i]) for i, total in self._whole.items()}
        return [(self._cut | whole).get(i) for i in range(len(self._inputs))]

    def of_params(self) -> list[torch.Tensor | None]:
        """Return the gradient of each parameter; others that tiles have read get theirs here, once for all tiles."""
        if self._unlisted:
            with torch.enable_grad():
                views = [param.view_as(param) for param in self._unlisted]
            torch.autograd.backward(views, [total.result(param) for param, total in self._unlisted.items()])
        return [self._params[p].result(p) if p in self._params else None for p in self._work.params]


@contextlib.contextmanager
def _without_hooks(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let nobody see the gradients of ``params`` inside: hooks on them are for the sum of all tiles."""
    hooks = [(p._backward_hooks, dict(p._backward_hooks)) for p in params if p._backward_hooks]
    for known, _ in hooks:
        known.clear()
    try:
        yield
    finally:
        for known, kept in hooks:
            known.update(kept)


def _unlisted(output: torch.Tensor, listed: set[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors for which autograd would accumulate a gradient of ``output``, and which are not ``listed``."""
    leaves, seen, stack = dict[torch.Tensor, None](), set[Any](), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and leaf not in listed:
            leaves[leaf] = None
        stack += [following for following, _ in node.next_functions]
    return [*leaves]


def _parameters(owners: Iterable[Any], compute_params: Iterable[Any] | None) -> list[torch.Tensor]:
    """Return the parameters of the modules among ``owners``, and those that the caller has named."""
    params: dict[torch.Tensor, None] = {}
    for owner in owners:
        owner = getattr(owner, "__self__", owner)
        if isinstance(owner, nn.Module):
            params |= dict.fromkeys(owner.parameters())
    return [*(params | dict.fromkeys(p for p in compute_params or () if isinstance(p, torch.Tensor)))]


def tiled(
    run: Compute,
    cut: Sequence[torch.Tensor],
    *,
    dims: Sequence[int],
    tiles: int,
    whole: Sequence[torch.Tensor] = (),
    join: int = 0,
    reduction: Reduction | None = None,
    params: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Compute ``run(*cut, *whole)`` in ``tiles`` tiles of the ``cut`` tensors along ``dims``; see the module.

    The outputs are joined along ``join`` or, where they are scalars, reduced. ``params`` are those that ``run`` reads.
    Raises UsageError for a number of tiles below 1, for tensors of different lengths and for other outputs.
    """
    if not isinstance(tiles, int) or isinstance(tiles, bool) or tiles < 1:
        raise UsageError(f"the number of tiles (shards) is at least 1, not {tiles!r}")
    lengths = [tensor.shape[dim] for tensor, dim in zip(cut, dims, strict=True)]
    if len(set(lengths)) != 1:
        raise UsageError(f"tensors that are cut into tiles together have lengths {lengths}; they have to be equal")
    work = _TiledWork(run, tuple(dims), pieces(lengths[0], tiles), join, reduction)
    out: torch.Tensor = _Tiled.apply(work, len(cut) + len(whole), *cut, *whole, *params)
    return out


def _sequence_dim(tensor: torch.Tensor, seqlen: int, key: str) -> int:
    for dim in (1, 0):
        if tensor.dim() > dim and tensor.shape[dim] == seqlen:
            return dim
    raise UsageError(
        f"sequence_tiled_compute: {key!r} has the shape {tuple(tensor.shape)}, in which neither dimension 1 nor 0 is "
        f"seqlen ({seqlen}); pass it in kwargs_to_pass, or the right seqlen"
    )


class SequenceTiledCompute:
    """Tiled computation of a function of keyword arguments; ``apply`` takes the values after the keys."""

    @staticmethod
    def apply(
        fn: Compute,
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str | None,
        compute_params: Iterable[Any] | None,
        output_unshard_dimension: int,
        output_reduction: Reduction | None,
        *args: Any,
    ) -> torch.Tensor:
        """Compute as ``sequence_tiled_compute`` does; ``args`` are the values of both lists of keys, in order."""
        named = dict(zip([*keys_to_shard, *keys_to_pass], args, strict=True))
        if grad_requiring_tensor_key is not None and grad_requiring_tensor_key not in keys_to_shard:
            raise UsageError(
                f"sequence_tiled_compute: grad_requiring_tensor_key {grad_requiring_tensor_key!r} is none of the keys "
                f"of kwargs_to_shard ({', '.join(keys_to_shard)})"
            )
        cut = {key: named[key] for key in keys_to_shard if isinstance(named[key], torch.Tensor)}
        rest = {key: value for key, value in named.items() if key not in cut}
        whole = {key: value for key, value in rest.items() if isinstance(value, torch.Tensor) and value.requires_grad}
        whole = {key: value for key, value in whole.items() if not isinstance(value, nn.Parameter)}
        fixed = {key: value for key, value in rest.items() if key not in whole}
        named_params = [value for value in fixed.values() if isinstance(value, nn.Parameter)]

        def run(*values: torch.Tensor) -> torch.Tensor:
            return fn(**dict(zip([*cut, *whole], values, strict=True)), **fixed)

        return tiled(
            functools.wraps(fn)(run),
            list(cut.values()),
            dims=[_sequence_dim(value, seqlen, key) for key, value in cut.items()],
            tiles=shards,
            whole=list(whole.values()),
            join=output_unshard_dimension,
            reduction=output_reduction,
            params=_parameters([fn, *fixed.values()], [*(compute_params or ()), *named_params]),
        )


def sequence_tiled_compute(
    fn: Compute,
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str | None,
    compute_params: Iterable[Any] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: Reduction | None = "mean",
) -> torch.Tensor:
    """Compute ``fn(**kwargs_to_shard, **kwargs_to_pass)`` in ``shards`` tiles of the sequence; backward recomputes.

    Args:
        kwargs_to_shard: Tensors [batch, seqlen, ...] or [seqlen, ...], of which ``fn`` gets a tile; others as they are.
        grad_requiring_tensor_key: Key among them of the tensor that needs a gradient; all that do get theirs.
        compute_params: Parameters that ``fn`` reads; those of modules among the arguments are found without.
        output_reduction: "mean" (weighed by the positions of a tile) or "sum" of scalars; None joins tensors.
    """
    return SequenceTiledCompute.apply(
        fn,
        seqlen,
        shards,
        list(kwargs_to_shard),
        list(kwargs_to_pass),
        grad_requiring_tensor_key,
        compute_params,
        output_unshard_dimension,
        output_reduction,
        *kwargs_to_shard.values(),
        *kwargs_to_pass.values(),
    )


class TiledMLP:
    """Tiled computation of ``fn(module, x)``."""

    @staticmethod
    def apply(
        fn: Compute, module: Any, x: torch.Tensor, shards: int, compute_params: Iterable[Any] | None = None
    ) -> torch.Tensor:
        """Return ``fn(module, x)`` for ``x`` [batch, sequence, hidden] or [tokens, hidden], cut into ``shards``."""
        dim = max(0, x.dim() - 2)
        params = _parameters([module, fn], compute_params)
        return tiled(functools.partial(fn, module), [x], dims=[dim], tiles=shards, join=dim, params=params)


class TiledFusedLogitsLoss:
    """Tiled computation of a loss ``fn(module, x, y)`` or, with a mask, ``fn(module, x, y, mask)``."""

    @staticmethod
    def apply(
        fn: Compute,
        module: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Iterable[Any] | None,
        output_reduction: Reduction,
    ) -> torch.Tensor:
        """Return the "mean" (weighed by the positions of a tile) or "sum" of the scalars of ``shards`` tiles.

        ``x`` is [batch, sequence, hidden] or [tokens, hidden]; ``y`` and ``mask`` are cut along the same dimension.
        """
        if output_reduction not in ("mean", "sum"):
            raise UsageError(f"TiledFusedLogitsLoss: output_reduction is 'mean' or 'sum', not {output_reduction!r}")
        cut = [x, y] if mask is None else [x, y, mask]
        dims = [max(0, x.dim() - 2)] * len(cut)
        params = _parameters([module, fn], compute_params)
        run = functools.partial(fn, module)
        return tiled(run, cut, dims=dims, tiles=shards, reduction=output_reduction, params=params)
