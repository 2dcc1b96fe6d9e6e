"""Repeated blocks that keep, recompute or offload their activations (``sequence.plan``), and copies of Transformers.

Both take the place where a model of Transformers calls torch's checkpointing: ``_gradient_checkpointing_func`` of each
block. Two forwards keep the inputs of blocks alone; the second is measured, and at the third the ranks choose together.
"""

import contextlib
import functools
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from deepspeed.accelerator.device import get_accelerator
from deepspeed.client.attrs import replace_attribute
from deepspeed.comm.collectives import AxisGroup, gather_objects
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.model.blocks import MemoryConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.monitor import hostmem
from deepspeed.monitor.log import log_dist
from deepspeed.monitor.program import size
from deepspeed.sequence.tiling.choice import BlockCost, Choice, Keep, Room, choose
from deepspeed.sequence.tiling.offload import (
    OffloadActivations,
    get_checkpoint_hidden_states_offloading_ctx_manager,
    is_weight,
)
from deepspeed.zero.memory.fit import RankMemory, limits_present

_MEASURED, _CHOSEN = 2, 3  # forwards in training
_SPARE = 16  # of the memory there is, one part in so many is left to fragmentation
_SAMPLE = 64 << 20  # bytes of the copies that measure the link
_CALL, _FLAG = "_gradient_checkpointing_func", "gradient_checkpointing"
_DROPOUT = ("dropout_p", "p_dropout")


def plan_blocks(model: nn.Module, cfg: DeepSpeedConfig, mesh: Mesh, back: ExitStack) -> None:
    """Let blocks of ``model`` keep what ``sequence.plan`` says, and their copies to the host have their own stream.

    All ranks of ``mesh`` choose together. ``back`` undoes it. Raises DeepSpeedConfigError for a plan of a model whose
    blocks cannot be checkpointed, or beside pipeline stages.
    """
    _copy_beside(model, back)
    if cfg.sequence.plan == "off":
        return
    if mesh.pp.size > 1:
        raise DeepSpeedConfigError('sequence.plan beside pipeline stages is not in this release; set it to "off"')
    stacks = [stack for stack in model.modules() if isinstance(stack, nn.ModuleList)]
    blocks = [*dict.fromkeys(block for stack in stacks for block in stack if hasattr(block, _FLAG))]
    if not blocks:
        raise DeepSpeedConfigError(
            f'sequence.plan is "{cfg.sequence.plan}", which needs blocks that Transformers can checkpoint, and '
            f'{type(model).__name__} has none. Set it to "off", or checkpoint its layers yourself'
        )
    planned = PlannedBlocks(blocks, cfg.memory, mesh.job)
    back.callback(model.register_forward_hook(planned.end).remove)
    for number, block in enumerate(blocks):
        replace_attribute(block, _FLAG, value=True, back=back)
        replace_attribute(block, _CALL, functools.partial(planned.run, number), back)


def _copy_beside(model: nn.Module, back: ExitStack) -> None:
    """Replace checkpoint functions that copy by torch's ``save_on_cpu``, as those of Transformers do with ``offload``:
    its copies hold up the stream that computes.
    """
    manager = get_checkpoint_hidden_states_offloading_ctx_manager()
    for module in model.modules():
        call = vars(module).get(_CALL)
        if isinstance(call, functools.partial) and "save_on_cpu" in _names(call.func):
            replace_attribute(module, _CALL, functools.partial(manager.run, checkpoint, **call.keywords), back)


def _names(function: Any) -> tuple[str, ...]:
    """Return the names that a Python function uses."""
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_names", ())
    return names


class _Attention:
    """Calls of attention kernels in one block, whose values ``offload`` keeps for the recomputation; None: measured."""

    def __init__(self, offload: OffloadActivations | None) -> None:
        self._offload = offload
        self._kept: list[Any] = []
        self._left: Iterator[Any] = iter(())
        self.spans: list[tuple[Any, Any]] = []
        self.nbytes = 0

    def contexts(self) -> tuple[Any, Any]:
        """Return contexts for the forward and the recomputation, as torch's ``checkpoint`` takes them."""
        again = contextlib.nullcontext() if self._offload is None else _Calls(self._again, self._begin)
        return _Calls(self._first), again

    def _begin(self) -> None:
        self._left = iter(self._kept)

    def _first(self, call: Callable[[], Any]) -> Any:
        begin = _mark() if self._offload is None else None
        out = call()
        values = out if isinstance(out, tuple | list) else [out]
        if self._offload is None:
            self.spans.append((begin, _mark()))
            self.nbytes += sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        else:
            self._kept.append([self._offload.hold(value) for value in values])
        return out

    def _again(self, _: Callable[[], Any]) -> Any:
        assert self._offload is not None
        values = tuple(self._offload.get(value) for value in next(self._left))
        return values if len(values) > 1 else values[0]


class _Calls(TorchDispatchMode):
    """Run calls of attention kernels, as functions without arguments, by ``run``; first ``begin``."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Callable[[], Any]], Any], begin: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._run, self._begin = run, begin

    def __enter__(self) -> Any:
        """Begin anew, as a graph that is retained is computed again."""
        self._begin()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Find attention kernels by their names."""
        call = functools.partial(func, *args, **(kwargs or {}))
        return self._run(call) if _is_attention(func) and not _draws(func, args, kwargs or {}) else call()


@functools.cache
def _is_attention(func: Any) -> bool:
    name = func.name().lower() if hasattr(func, "_schema") else ""
    return ("attention" in name or "flash" in name) and not ("backward" in name or "bwd" in name)


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Tell whether ``func`` draws random numbers, which a recomputation without it would give to what comes next."""
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    return any(given.get(name) for name in _DROPOUT)


class _Sizes(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes of activations that autograd saves inside, each once."""

    def __init__(self) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self._by_storage: dict[Any, int] = {}

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_weight(tensor):
            storage = tensor.untyped_storage()
            self._by_storage[StorageWeakRef(storage)] = storage.nbytes()
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(self._by_storage.values())


def _mark() -> Any:
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Return what blocks have in common that take equally long."""
    numel = sum(getattr(param, "ds_numel", param.numel()) for param in block.parameters())
    kinds = (getattr(block, name, None) for name in ("attention_type", "layer_type"))
    return type(block), numel, *(kind if isinstance(kind, str) else "" for kind in kinds)


@dataclass
class _Measured:
    """One block in the forward that is measured."""

    kind: tuple[Any, ...]
    inputs: int
    attention: _Attention
    begin: Any
    end: Any = None


@dataclass
class _Facts:
    """What one rank has measured. ``device``: bytes that are left there or, on the CPU, minus those that came and went.
    ``host`` and ``pools``: the memory of its process, and what that is a part of.
    """

    blocks: list[BlockCost]
    device: int
    link: float
    host: int
    pools: tuple[hostmem.Pool, ...]


class PlannedBlocks:
    """Blocks of a model that keep what was chosen for them; ``run`` stands for torch's ``checkpoint``."""

    def __init__(self, blocks: Sequence[nn.Module], memory: MemoryConfig, group: AxisGroup) -> None:
        self._kinds = [_kind(block) for block in blocks]
        self._memory, self._group = memory, group
        self._offload = get_checkpoint_hidden_states_offloading_ctx_manager(max_fwd_stash_count=4)
        self.choices = [Choice(Keep.INPUTS, 1.0)] * len(blocks)
        self._inputs = [0] * len(blocks)  # bytes, as planned
        self._forwards, self._last, self._warned = 0, len(blocks), False
        self._measured: list[_Measured | None] = [None] * len(blocks)
        self._sizes: dict[tuple[Any, ...], _Sizes] = {}
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()  # of each forward without its backward the last function
        self._together = 1

    def __deepcopy__(self, _: Any) -> "PlannedBlocks":
        """Stay one for copies of the model."""
        return self

    def run(self, number: int, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(*args)``, the forward of block ``number``. Collective in the third forward in training."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return function(*args)
        if number <= self._last:
            self._begin()
        self._last = number
        if self._forwards <= _MEASURED and number == len(self.choices) - 1:
            self._alive.add(function)
        if self._forwards == _MEASURED:
            return self._measure(number, function, args)
        choice = self.choices[number]
        self._offload.share = share = self._share(number, args)
        with self._offload if share else contextlib.nullcontext():
            if choice.keep is Keep.EVERYTHING:
                return function(*args)
            spare = _Attention(self._offload).contexts if choice.keep is Keep.ATTENTION else noop_context_fn
            return checkpoint(function, *args, use_reentrant=False, context_fn=spare)

    def end(self, module: nn.Module, *_: Any) -> None:
        """End a forward of the whole model; warn once where one in training has passed by ``run``."""
        none = self._last == len(self.choices)
        if none and module.training and torch.is_grad_enabled() and not self._warned:
            self._warned = True
            text = "sequence.plan has no effect: blocks do not call it once compiled, or checkpointed after initialize"
            log_dist(f'{text}. Compile modules inside of them alone, or set it to "off"', level=logging.WARNING)
        self._last = len(self.choices)

    def _share(self, number: int, args: Any) -> float:
        """Return the share that goes to the host: of a longer batch than the planned one, all that is longer."""
        share, planned, nbytes = self.choices[number].share, self._inputs[number], _input_bytes(args)
        return 1.0 - (1.0 - share) * planned / nbytes if nbytes > planned and planned else share

    def _begin(self) -> None:
        self._forwards += 1
        if self._forwards <= _CHOSEN:
            self._together = max(self._together, len(self._alive) + 1)
        if self._forwards == _MEASURED:
            get_accelerator().reset_peak_memory_stats()
        elif self._forwards == _CHOSEN:
            self._choose()

    def _measure(self, number: int, function: Callable[..., Any], args: Any) -> Any:
        attention, kind = _Attention(None), self._kinds[number]
        measured = self._measured[number] = _Measured(kind, _input_bytes(args), attention, _mark())
        if kind in self._sizes:
            self._offload.share = 1.0
            with self._offload:
                out = checkpoint(function, *args, use_reentrant=False, context_fn=attention.contexts)
        else:
            self._sizes[kind] = _Sizes()
            with self._sizes[kind], attention.contexts()[0]:
                out = function(*args)
        measured.end = _mark()
        return out

    def _costs(self) -> list[BlockCost]:
        """Return what was measured, with the means of all blocks of a kind."""
        get_accelerator().synchronize()
        measured = [block for block in self._measured if block is not None and block.end is not None]
        costs: dict[tuple[Any, ...], BlockCost] = {}
        for kind in dict.fromkeys(block.kind for block in measured):
            same = [block for block in measured if block.kind == kind]
            seconds = sum(block.begin.elapsed_time(block.end) for block in same) / 1e3
            spans = [span for block in same for span in block.attention.spans]
            kernels = sum(begin.elapsed_time(end) for begin, end in spans) / 1e3
            inputs = max(block.inputs for block in same)
            attention = inputs + max(block.attention.nbytes for block in same)
            nbytes = inputs, attention, max(attention, self._sizes[kind].nbytes)
            costs[kind] = BlockCost(nbytes, seconds / len(same), min(seconds, kernels) / len(same))
        nothing = BlockCost((0, 0, 0), 0.0)  # of a block that was left out
        return [costs.get(kind, nothing) for kind in self._kinds]

    def _choose(self) -> None:
        """Choose what blocks keep. Collective."""
        everyone = gather_objects(self._facts(), self._group)
        costs = [_slowest(of_ranks) for of_ranks in zip(*(rank.blocks for rank in everyone), strict=True)]
        present = limits_present([RankMemory(rank.host, 0, 0, rank.pools) for rank in everyone])
        host = (self._memory.host_limit or present.host) - max(rank.host for rank in everyone)
        device, link = min(rank.device for rank in everyone), min(rank.link for rank in everyone)
        self._inputs = [cost.nbytes[Keep.INPUTS] for cost in costs]
        if not link:  # on the CPU, where inputs were kept in the same memory
            device, host = device + host + sum(self._inputs), 0
        # page-locked memory is allocated in powers of two
        room = Room(max(0, device) // self._together, max(0, host) // 2 // self._together, link)
        self.choices = choose(costs, room)
        self._measured, self._sizes = [None] * len(costs), {}
        log_dist(_sentence(costs, self.choices, room))

    def _facts(self) -> _Facts:
        accelerator = get_accelerator()
        costs, peak = self._costs(), accelerator.max_memory_allocated()
        now, pools = hostmem.rss_bytes(), tuple(hostmem.memory_pools())
        if accelerator.device_name() == "cpu":
            return _Facts(costs, min(0, now - peak), 0.0, now, pools)
        limit = self._memory.device_limit or accelerator.total_memory()
        return _Facts(costs, limit - limit // _SPARE - peak, _link(accelerator), now, pools)


def _input_bytes(args: Any) -> int:
    return sum(item.nbytes for item in args if isinstance(item, torch.Tensor) and item.requires_grad)


def _slowest(costs: Sequence[BlockCost]) -> BlockCost:
    """Return the cost of one block for the rank that has most to do."""
    most = max(cost.nbytes for cost in costs)
    return BlockCost(most, *max((cost.seconds, cost.attention) for cost in costs))


def _link(accelerator: Any) -> float:
    """Return the bytes a second of a copy to the device, while all ranks copy."""
    target = torch.empty(_SAMPLE, dtype=torch.uint8, device=accelerator.torch_device())
    source = accelerator.pin_memory(torch.empty(_SAMPLE, dtype=torch.uint8, device="cpu"))
    target.copy_(source, non_blocking=True)
    begin = _mark()
    target.copy_(source, non_blocking=True)
    end = _mark()
    accelerator.synchronize()
    return float(_SAMPLE / max(1e-9, begin.elapsed_time(end) / 1e3))


def _sentence(costs: Sequence[BlockCost], choices: Sequence[Choice], room: Room) -> str:
    """Say what was chosen."""
    named = {Keep.EVERYTHING: "everything", Keep.ATTENTION: "inputs and attention", Keep.INPUTS: "inputs alone"}
    counts = [(sum(choice.keep is keep for choice in choices), text) for keep, text in named.items()]
    kept = [cost.nbytes[choice.keep] for cost, choice in zip(costs, choices, strict=True)]
    away = sum(map(operator.mul, kept, (choice.share for choice in choices)))
    pairs = list(zip(costs, choices, strict=True))
    again = sum(cost.recomputed(choice.keep) for cost, choice in pairs) / max(1e-9, sum(c.seconds for c in costs))
    over = sum(kept) - away > room.device + 1
    return (
        f"sequence.plan: of {len(choices)} blocks {', '.join(f'{n} keep {text}' for n, text in counts if n)}: "
        f"{size(int(sum(kept) - away))} on the device, {size(int(away))} in host memory; the backward computes "
        f"{again:.0%} of their forward again{'; not even the inputs fit' if over else ''}"
    )
