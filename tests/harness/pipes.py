"""Small models as lists of layers, their data, and the one-process run that a pipeline has to equal."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.tools.verify.grads import full_parameters

WIDTH, VOCABULARY, LENGTH, SAMPLES = 8, 11, 5, 2


class Block(nn.Module):
    """A residual block whose weights follow from ``seed`` alone, wherever it is built."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Embed(nn.Module):
    """Tokens to vectors, and with ``logits`` back."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        weight = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(seed)) / 2
        self.weight = nn.Parameter(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


def logits(module: nn.Module, x: Tensor) -> Tensor:
    return x @ module.weight.t()


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def layers(blocks: int = 6, *, tied: bool = True) -> list[Any]:
    """Embedding, blocks, and the embedding again as output (or a linear layer)."""
    ends: list[Any] = [TiedLayerSpec("embed", Embed, 1), TiedLayerSpec("embed", Embed, 1, forward_fn=logits)]
    if not tied:
        ends = [LayerSpec(Embed, 1), LayerSpec(Head, 2)]
    return [ends[0], *(LayerSpec(Block, 10 + i) for i in range(blocks)), ends[1]]


class Head(Embed):
    """Vectors to scores of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Plain(nn.Module):
    """The same layers in one process; parameters are named as in a PipelineModule."""

    def __init__(self, specs: list[Any]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.calls: list[Callable[[Any], Any]] = []
        for index, spec in enumerate(specs):
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = spec.build()
                module = self.tied_modules[spec.key]
                self.calls.append(lambda x, m=module, f=spec.forward_fn: f(m, x) if f is not None else m(x))
            else:
                layer = spec.build() if isinstance(spec, LayerSpec) else spec
                if isinstance(layer, nn.Module):
                    self.add_module(str(index), layer)
                self.calls.append(layer)

    def forward(self, x: Any) -> Any:
        for call in self.calls:
            x = call(x)
        return x


def micro_batch(step: int, micro: int, data_rank: int, *, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """(tokens, labels) of one micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + data_rank)
    tokens = torch.randint(0, VOCABULARY, (2, SAMPLES, length), generator=generator)
    return tokens[0], tokens[1]


def batches(data_rank: int, *, micros: int, steps: int = 100, **how: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """What a data iterator yields."""
    for step in range(steps):
        for micro in range(micros):
            yield micro_batch(step, micro, data_rank, **how)


def config(stage: int, micros: int, **changes: Any) -> dict[str, Any]:
    """A small fp32 configuration with clipping; ``changes`` replace or add top-level keys."""
    zero = {"stage": stage, "param_persistence_threshold": 20, "reduce_bucket_size": 200, **changes.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": micros,
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}},
        **changes,
    }


def plain_run(
    model: list[Any] | nn.Module, *, micros: int | Sequence[int] = 4, data_ranks: int = 1, steps: int = 3,
    loss_fn: Any = cross_entropy, batch: Callable[[int, int, int], tuple[Any, Any]] = micro_batch,
) -> tuple[list[float], list[float], dict[str, Tensor]]:  # fmt: skip
    """Losses, norms (before clipping) and parameters of the one-process run of these layers, or of a module.
    ``micros``: micro-batches of a data-parallel rank in every step, or in each.
    """
    model = model if isinstance(model, nn.Module) else Plain(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)
    losses, norms = [], []
    for step, count in enumerate([micros] * steps if isinstance(micros, int) else micros):
        total = 0.0
        for rank, micro in product(range(data_ranks), range(count)):
            inputs, labels = batch(step, micro, rank)
            loss = loss_fn(model(inputs), labels) / (count * data_ranks)
            loss.backward()
            total += float(loss.detach())
        for param in model.parameters():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}


def start(module: PipelineModule, ds_config: dict[str, Any], **kwargs: Any) -> Any:
    return deepspeed.initialize(model=module, config=ds_config, **kwargs)[0]


def engine_of(
    specs: list[Any], ds_config: dict[str, Any], *, stages: int = 2, loss_fn: Any = cross_entropy, **module: Any
) -> Any:
    """An engine that trains these layers in stages."""
    return start(PipelineModule(specs, num_stages=stages, loss_fn=loss_fn, **module), ds_config)


def trained(engine: Any, data: Iterator[Any], *, steps: int = 3) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and norms of so many batches, and the parameters of this stage; the engine is at its end."""
    losses, norms = [], []
    for _ in range(steps):
        losses.append(float(engine.train_batch(data)))
        norms.append(engine.get_global_grad_norm())
    params = full_parameters(engine.module)
    engine.destroy()
    return losses, norms, params


def pipe_run(
    specs: list[Any], ds_config: dict[str, Any], *, stages: int = 2, steps: int = 3,
    batch: Callable[[int, int, int], tuple[Any, Any]] = micro_batch, **module: Any,
) -> tuple[list[float], list[float], dict[str, Tensor]]:  # fmt: skip
    """The same on this rank of a pipeline; parameters are those of its stage."""
    engine = engine_of(specs, ds_config, stages=stages, **module)
    places = product(range(steps), range(engine.gradient_accumulation_steps()))
    return trained(engine, (batch(*place, engine.mesh.data.index) for place in places), steps=steps)


def worst(run: tuple[Any, Any, Any], plain: tuple[Any, Any, Any]) -> float:
    """The largest error of losses, norms and parameters, each against its size or 1."""
    (losses, norms, params), (expected_losses, expected_norms, expected) = run, plain
    pairs = [*zip(losses, expected_losses, strict=True), *zip(norms, expected_norms, strict=True)]
    errors = [abs(a - b) / max(1.0, abs(b)) for a, b in pairs]
    return max(errors + [float((value - expected[name]).abs().max()) for name, value in params.items()])


def case(
    stages: int, level: int, schedule: str, micros: int = 4, chunks: int = 1, *, specs: list[Any] | None = None,
    batch: Callable[[int, int, int], tuple[Any, Any]] = micro_batch, loss_fn: Any = cross_entropy,
    module: dict[str, Any] | None = None, pipeline: dict[str, Any] | None = None, **changes: Any,
) -> float:  # fmt: skip
    """The error of one setting on this rank, against the one-process run. ``module``, ``pipeline``: further options of
    these; ``changes``: of the configuration.
    """
    specs, ways = layers() if specs is None else specs, dist.get_world_size() // stages
    block = {"schedule": schedule, "chunks_per_stage": chunks, **(pipeline or {})}
    data = {"batch": batch, "loss_fn": loss_fn}
    run = pipe_run(specs, config(level, micros, pipeline=block, **changes), stages=stages, **data, **(module or {}))
    return worst(run, plain_run(specs, micros=micros, data_ranks=ways, **data))
