"""Shared pieces of the client tests: skipping, tiny random models, token data, a plain reference run and clean state.

Nothing here imports a client at the top: the files are importable where no client is installed.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY, LENGTH, HIDDEN = 64, 8, 32
LR = 0.05
MICRO = 2


def need(*packages: str) -> None:
    """Skip the calling test module unless every package, and a distribution named deepspeed, is installed."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (see tests/compat/README.md)", allow_module_level=True)
    try:
        importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        # The clients look the package up by distribution name and switch every DeepSpeed feature off when it has none.
        pytest.skip(
            "no distribution named deepspeed is installed (see tests/compat/README.md)", allow_module_level=True
        )


def forget_clients() -> None:
    """Undo what earlier tests left in the globals and the environment of Accelerate and Transformers."""
    for name in [n for n in os.environ if n.startswith("ACCELERATE_")]:
        del os.environ[name]
    if importlib.util.find_spec("accelerate") is not None:
        state = importlib.import_module("accelerate.state")
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    if importlib.util.find_spec("transformers") is not None:
        importlib.import_module("transformers.integrations.deepspeed").unset_hf_deepspeed_config()


def llama(**changes: Any) -> nn.Module:
    """A random Llama with two layers of width 32, the same on every call."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(11)
    return transformers.LlamaForCausalLM(llama_config(**changes))


def llama_config(**changes: Any) -> Any:
    transformers = importlib.import_module("transformers")
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.LlamaConfig(**{**sizes, **changes})


def sentences(count: int) -> list[dict[str, Tensor]]:
    """``count`` rows of random tokens, each its own label."""
    tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def batches(rows: list[dict[str, Tensor]], size: int = MICRO) -> list[dict[str, Tensor]]:
    """The rows in order, ``size`` at a time, stacked."""
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [{key: torch.stack([row[key] for row in group]) for key in group[0]} for group in groups]


def mine(items: list[Any]) -> list[Any]:
    """Every world-size-th item, beginning with this rank's."""
    return items[dist.get_rank() :: dist.get_world_size()]


def plain_run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[dict[str, Tensor]],
    *,
    per_step: int,
    clip: float = 0.0,
    after_step: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Train in plain torch, ``per_step`` batches (of all ranks and the whole accumulation) to a step; the mean loss of
    each step.
    """
    losses = []
    for start in range(0, len(data), per_step):
        parts = [model(**batch).loss / per_step for batch in data[start : start + per_step]]
        torch.stack(parts).sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        losses.append(float(torch.stack(parts).detach().sum()))
    return losses


def mean_over_ranks(values: Iterable[float]) -> list[float]:
    """Element-wise mean of a list over all ranks."""
    total = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def apart(first: Iterable[float], second: Iterable[float]) -> float:
    """The largest difference of two lists of equal length."""
    pairs = list(zip(first, second, strict=True))
    assert pairs, "nothing was compared"
    return max(abs(a - b) for a, b in pairs)


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Whole copies of the parameters of a (sharded) model. Collective."""
    deepspeed = importlib.import_module("deepspeed")
    named = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: p.detach().clone() for name, p in named.items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[n], second[n]) for n in first)


def fill(model: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """Give the model, which was born sharded, these parameters. Collective."""
    deepspeed = importlib.import_module("deepspeed")
    named = dict(model.named_parameters())
    assert all(hasattr(p, "ds_id") for p in named.values())
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(named.values()), modifier_rank=0):
        for name, param in named.items():
            param.copy_(values[name])
    return model


def weights_apart(model: nn.Module, expected: dict[str, Tensor]) -> float:
    """The largest difference of any whole parameter of a (sharded) model. Collective."""
    deepspeed = importlib.import_module("deepspeed")
    named = dict(model.named_parameters())
    assert set(named) <= set(expected), set(named) - set(expected)
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return max(float((p.detach().float() - expected[n].float()).abs().max()) for n, p in named.items())


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters of a plain model."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def zero_block(stage: int, **changes: Any) -> dict[str, Any]:
    """A ``zero_optimization`` block under which small weights really are sharded."""
    block: dict[str, Any] = {"stage": stage}
    if stage == 3:
        block["stage3_param_persistence_threshold"] = 40
    return {**block, **changes}


def settings(stage: int, adam: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A configuration with the package's own AdamW."""
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": zero_block(stage),
        "optimizer": {"type": "AdamW", "params": adam or {"lr": LR, "eps": 1e-2}},
        **changes,
    }


def alive(content: dict[str, Any]) -> Any:
    """Make the configuration known to Transformers; the caller keeps the result, which is held weakly there."""
    forget_clients()
    return importlib.import_module("transformers.integrations").HfDeepSpeedConfig(content)


def save_once(model: nn.Module, folder: str) -> None:
    """The first rank writes what all have."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)  # type: ignore[operator]
    dist.barrier()


def gloo_accelerator(plugin: Any, **more: Any) -> Any:
    """An Accelerator on gloo. Not ``cpu=True``: that switches DeepSpeed off without a word."""
    accelerate = importlib.import_module("accelerate")
    handlers = [accelerate.InitProcessGroupKwargs(backend="gloo")]
    return accelerate.Accelerator(deepspeed_plugin=plugin, kwargs_handlers=handlers, **more)


def losses_of(engine: Any, data: Iterable[dict[str, Tensor]]) -> list[float]:
    """Train an engine, a batch to a step."""
    losses = []
    for batch in data:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def micro_batches(steps: int, ranks: int = 0) -> list[list[dict[str, Tensor]]]:
    """Of each step those of all ranks, or so many; each its own labels."""
    ranks = ranks or dist.get_world_size()
    tokens = torch.stack([row["input_ids"] for row in sentences(MICRO * ranks * steps)])
    return [[{"input_ids": t, "labels": t} for t in step] for step in tokens.view(steps, ranks, MICRO, -1)]


def write_json(folder: str, content: dict[str, Any]) -> str:
    """Write a configuration file for this rank and return its path."""
    path = Path(folder) / f"config_{dist.get_rank()}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)
