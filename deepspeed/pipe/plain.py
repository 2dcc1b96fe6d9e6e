"""Pipelines of models that were not written as a list of layers: decoders cut by their list of blocks.

Every stage runs the model's code with its inputs; masks, positions and the like it computes itself. The list of blocks
holds those of the stage only. The first of them is given what the stage before has sent, and behind the last one stands
a stub that leaves the forward with what it is given. What runs before the blocks is real on the first stage, and of the
right shape elsewhere; what runs behind them is on the last stage.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from deepspeed.client.attrs import recursive_getattr, recursive_setattr
from deepspeed.errors import UsageError
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.orders import Micro
from deepspeed.zero.hooks import tensors_in
from deepspeed.zero.partition import find_blocks


class _LeaveError(Exception):
    """Carry the input of the next stage out of the model's forward."""


class _Exit(nn.Module):
    """Leave the model's forward, behind the last block of a stage."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        given: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
        for name, value in given[1:]:
            if any(tensor.requires_grad for tensor in tensors_in(value, 1)):
                raise UsageError(
                    f"the blocks are given a second value with a gradient (argument {name!r}), and a stage sends the "
                    "next one the first argument alone; write the model as layers of a PipelineModule"
                )
        raise _LeaveError(given[0][1])


class _Entry(nn.Module):
    """Stand in the place of ``block``, the first of a chunk: give it ``value``, whatever the model computed before.

    A recomputation in the backward gets ``value``, too: it belongs to the forward, not to the time.
    """

    def __init__(self, block: nn.Module, value: Any) -> None:
        super().__init__()
        self.__dict__.update(_block=block, _value=value, training=block.training)  # no child: its parameters have names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            return self._block(self._value, *args[1:], **kwargs)
        return self._block(**kwargs | {next(iter(kwargs)): self._value})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


class _Absent(nn.Module):
    """Stand for a module of the last stage, on another stage."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "the model calls a module before its blocks that was taken for one behind them; name it in first="
        )


class PlainPipeline(PipelineModule):
    """Pipeline of ``model``, of which this rank keeps its part, for good. Made by ``cut_model``; names are kept."""

    repeats_blocks = False
    _whole: dict[int, Any]  # the blocks of this rank, by their place
    _list: Any
    _path: str
    _first: tuple[str, ...]
    _model: Any

    def __init__(self, model: nn.Module, path: str, first: Sequence[str], num_stages: int, **options: Any) -> None:
        blocks = list(recursive_getattr(model, path))
        # No child: its own children are, so that parameters keep their names.
        self.__dict__.update(_first=tuple(first), _path=path, _whole=dict(enumerate(blocks)), _model=model, _list=None)
        super().__init__(blocks, num_stages, **options)

    def recut(self, *how: Any, **more: Any) -> None:
        """Make the first cut; raise UsageError at a second, which would want blocks that the first has dropped."""
        if self._list is not None:
            raise UsageError(
                "a model that is cut by its blocks is cut once: pass chunks_per_stage and chunk_style to cut_model"
            )
        super().recut(*how, **more)

    def _build(self) -> None:
        """Take the model apart."""
        model = self._model
        self.__dict__.update(_list=recursive_getattr(model, self._path))
        if isinstance(self.loss_fn, nn.Module):
            model.loss_fn = self.loss_fn  # a child, as those of the model replace ours
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        local = {i for i, rank in self._layer_homes() if rank == self.rank_of_pipe}
        for index in [i for i in self._whole if i not in local]:
            del self._list._modules[str(index)]
            self._whole.pop(index), self._specs.__setitem__(index, _Absent())
        inside = {id(p) for p in self._list.parameters()}
        outside = [
            (n, m) for n, m in model.named_modules() if any(id(p) not in inside for p in m.parameters(recurse=False))
        ]
        # A module around the blocks runs before and behind them: its own parameters are on every stage.
        around = [(n, m) for n, m in outside if self._path.startswith(f"{n}." if n else "")]
        outside = [one for one in outside if one not in around]
        before = [(n, m) for n, m in outside if isinstance(m, nn.Embedding) or n in self._first]
        after = [one for one in outside if one not in before]
        self._around = [p for _, m in around for p in m.parameters(recurse=False)]
        early = {id(p) for _, m in before for p in m.parameters(recurse=False)}
        late = {id(p) for _, m in after for p in m.parameters(recurse=False)}
        ends, everywhere = early & late, {id(p) for p in self._around}
        homes = {**dict.fromkeys(ends, (self.homes[0], self.homes[-1])), **dict.fromkeys(everywhere, self.homes)}
        self._tied = {n: homes[id(p)] for n, p in model.named_parameters() if id(p) in homes}
        if self.rank_of_pipe != self.homes[-1]:
            for name, _ in after:
                recursive_setattr(model, name, _Absent())
        for _, module in before if self.rank_of_pipe != self.homes[0] else ():
            for name, param in list(module._parameters.items()):
                if not (self.rank_of_pipe == self.homes[-1] and id(param) in ends):
                    module._parameters[name] = None
            param = next(self._whole[min(local)].parameters())
            module.forward = partial(_zeros, getattr(module, "embedding_dim", None), param)
        self._ends = [m for _, m in before], [m for _, m in after]
        configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "__dict__")}
        # Configurations, and what each has a list of, by block.
        lists = [(c, n, v) for c in configs.values() for n, v in vars(c).items() if isinstance(v, (list, tuple))]
        self._by_block = [(config, name) for config, name, values in lists if len(values) == len(self._specs)]
        if hasattr(getattr(model, "config", None), "use_cache"):
            model.config.use_cache = False

    def train(self, mode: bool = True) -> "PlainPipeline":  # noqa: FBT001, FBT002 - as torch calls it
        """Set the mode of the model, too, which is no child."""
        self._model.training = mode
        return super().train(mode)

    @property
    def source(self) -> nn.Module:
        """Return the model that was cut."""
        model: nn.Module = self._model
        return model

    @property
    def readers(self) -> tuple[int, ...]:
        """Return all stages, as each computes masks and positions from the inputs."""
        return tuple(range(self.num_stages))

    def micro_batch(self, item: Any) -> Micro:
        """Return the micro-batch of a dict of the model's arguments, or of (inputs, labels)."""
        if isinstance(item, Mapping):
            return Micro(dict(item), item.get("labels"))
        return super().micro_batch(item)

    def run_chunk(self, chunk: int, value: Any, batch: Micro) -> Any:
        return self(value if chunk else None, chunk, batch.inputs)

    def forward(self, value: Any, chunk: int = 0, inputs: Any = None) -> Any:
        """Return the model's output behind the last chunk; before it, the input of the next block."""
        try:
            with self._only(chunk, value):
                if isinstance(inputs, Mapping):
                    return self._model(**inputs)
                return self._model(*inputs) if isinstance(inputs, (tuple, list)) else self._model(inputs)
        except _LeaveError as left:
            return left.args[0]

    @contextmanager
    def _only(self, chunk: int, value: Any) -> Any:
        """Limit the list to the blocks of ``chunk``, of which the first is given ``value``.

        What a model of Transformers looks up by a block's place in the list, as its kind, begins with this chunk's.
        """
        start, stop = self.boundaries[chunk], self.boundaries[chunk + 1]
        everything = self._list._modules
        lists = [(config, name, getattr(config, name)) for config, name in self._by_block]
        for config, name, values in lists:
            setattr(config, name, values[start:] + values[:start])
        self._now = start
        self._list._modules = {str(i): self._whole[i] for i in range(start, stop)}
        if chunk:
            self._list._modules[str(start)] = _Entry(self._whole[start], value)
        if chunk + 1 < len(self.homes):
            self._list._modules["exit"] = _Exit()
        try:
            yield
        finally:
            self._list._modules = everything
            for config, name, values in lists:
                setattr(config, name, values)

    def loss(self, output: Any, batch: Micro) -> torch.Tensor:
        """Return the loss of ``loss_fn``, or the model's: ``output.loss``, ``output["loss"]`` or a tuple's first."""
        if self.loss_fn is None:
            head = output[0] if isinstance(output, tuple) and output else output
            named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            output = head if named is None else named
        return super().loss(output, batch)

    def params_of(self, chunk: int) -> list[nn.Parameter]:
        """Return the parameters around the blocks, of these, and of what runs before the first and behind the last."""
        before, after = self._ends
        modules = [self._whole[i] for i in range(self.boundaries[chunk], self.boundaries[chunk + 1])]
        modules += before if chunk == 0 else []
        modules += after if chunk + 1 == len(self.homes) else []
        return list(dict.fromkeys([*self._around, *(p for m in modules for p in m.parameters())]))

    def tied_homes(self) -> dict[str, tuple[int, ...]]:
        return {f"{n}.": tuple(sorted(set(homes))) for n, homes in self._tied.items() if len(set(homes)) > 1}

    def place(self, chunk: int, *, backward: bool) -> str:
        return f"blocks {self.boundaries[chunk]}-{self.boundaries[chunk + 1] - 1} of {self._path}"

    def set_checkpoint_interval(self, interval: int) -> None:
        if interval:
            raise UsageError("a model cut by its blocks recomputes them itself: model.gradient_checkpointing_enable()")


def _zeros(width: int | None, param: nn.Parameter, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Stand for what runs before the blocks: an embedding adds a dimension of ``width``, others keep the shape.

    The zeros have the dtype that ``param``, of a block, has by then: tables and masks that models make follow it.
    """
    dtype = value.dtype if value.is_floating_point() else param.dtype
    return torch.zeros(*value.shape, *(() if width is None else (width,)), dtype=dtype, device=value.device)


def cut_model(
    model: nn.Module,
    num_stages: int,
    *,
    blocks: str | None = None,
    first: Sequence[str] = (),
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    partition_method: str | Sequence[float] = "parameters",
    chunks_per_stage: int = 1,
    chunk_style: str = "loop",
) -> PlainPipeline:
    """Make a PipelineModule of ``model`` as it is, cut by the list of ``blocks`` (dotted path; default: the longest).

    Embeddings run before the blocks, and so do the modules named in ``first``; all others with parameters behind them.
    Batches are dicts of the model's arguments, or (inputs, labels); every stage reads them. The loss is the model's own
    (``output.loss``) or ``loss_fn(output, labels)``. Schedules with several chunks are prepared for here.
    """
    if blocks is None:
        parents = [path.rpartition(".")[0] for path, _ in find_blocks(model)]
        blocks = max(dict.fromkeys(parents), key=parents.count, default=None)
    config = getattr(model, "config", None) if num_stages > 1 else None
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"{type(model).__name__} has the blocks of an encoder and of a decoder; one list can be cut")
    if getattr(config, "output_router_logits", False):
        raise UsageError(
            "output_router_logits of the model's configuration asks for a loss over the routers of all blocks, and a "
            "stage has some of them; set it to False"
        )
    if not blocks or not isinstance(recursive_getattr(model, blocks), nn.ModuleList):
        raise UsageError(f"{type(model).__name__} has no nn.ModuleList of blocks; name it in blocks=")
    return PlainPipeline(
        model, blocks, first, num_stages, loss_fn=loss_fn, partition_method=partition_method,
        chunks_per_stage=chunks_per_stage, chunk_style=chunk_style,
    )  # fmt: skip
