"""What blocks of Transformers keep, bitwise as plain: their offload beside the computation, and ``sequence.plan``."""

import copy
import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.accelerator.device import get_accelerator
from deepspeed.monitor import hostmem
from deepspeed.sequence.tiling.choice import Choice, Keep
from deepspeed.sequence.tiling.offload import OffloadActivations
from deepspeed.utils import safe_get_full_grad
from tests.compat.common import need
from tests.harness.logs import logged
from tests.harness.training import make_config, start

need("transformers")
pytestmark = pytest.mark.timeout(240)
LAYERS, TOKENS, WIDTH, HEADS = 4, 24, 32, 4
KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
SIZES = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "vocab_size": 97}
HIDDEN = 2 * TOKENS * WIDTH * 4
CHOICES = {
    "kept": [Choice(Keep.EVERYTHING)] * LAYERS,
    "recomputed": [Choice(Keep.INPUTS, 1.0)] * LAYERS,
    "attention spared": [Choice(Keep.ATTENTION, 1.0)] * LAYERS,
    "offloaded": [Choice(Keep.EVERYTHING, 1.0)] * LAYERS,
    "in shares": [Choice(keep, 0.4) for keep in (*Keep, Keep.EVERYTHING)],
}


def _worth(self: OffloadActivations, tensor: torch.Tensor) -> bool:
    """Copies from the CPU to itself stand for those of a device."""
    return tensor.nbytes >= self._smallest


def _model(kind: str = "LlamaConfig") -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES, num_attention_heads=HEADS, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.2))
    return model.train()


def _step(engine: Any, seed: int = 0) -> list[torch.Tensor]:
    """The loss and all gradients of one batch."""
    torch.manual_seed(seed)
    ids = torch.randint(97, (2, TOKENS))
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    found = [loss.detach().clone(), *(safe_get_full_grad(p).clone() for p in engine.module.parameters())]
    engine.step()
    return found


def _equal(found: list[torch.Tensor], plain: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@mock.patch.object(OffloadActivations, "worth", _worth)
def _offload_of_transformers() -> dict[str, Any]:
    plain = start(_model(), make_config(0))
    expected = _step(plain)
    plain.destroy()
    model = _model()
    model.activation_checkpointing_enable(offload=True, every_n_layers=2)
    theirs = [layer._gradient_checkpointing_func for layer in model.model.layers]
    engine = start(model, make_config(0))
    ours = [layer._gradient_checkpointing_func for layer in model.model.layers]
    manager = ours[0].func.__self__
    with mock.patch.object(torch.autograd.graph.save_on_cpu, "__init__", side_effect=AssertionError):
        same = _equal(_step(engine), expected)
    engine.destroy()
    after = [layer._gradient_checkpointing_func for layer in model.model.layers]
    return {
        "same": same, "copied": manager.copied, "shared": len({id(call.func.__self__) for call in ours}),
        "undone": after == theirs, "kept": all(call.keywords == theirs[0].keywords for call in ours),
    }  # fmt: skip


def test_offload_of_transformers_copies_beside_the_computation(pool1: Any) -> None:
    (found,) = pool1.run(_offload_of_transformers)
    assert found["same"] and found["undone"] and found["shared"] == 1 and found["kept"]
    assert found["copied"] == 1  # of the two layers that are checkpointed, the last one's input stays


class _Kernels(TorchDispatchMode):
    """Count the calls of the attention kernel."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.name() == KERNEL
        return func(*args, **(kwargs or {}))


def _planned(model: Any) -> Any:
    return model.model.layers[0]._gradient_checkpointing_func.func.__self__


@mock.patch.object(OffloadActivations, "worth", _worth)
def _chosen(name: str, **config: Any) -> tuple[bool, int, int]:
    """Whether a step is bitwise the plain one; calls of the attention kernel; copies to the host."""
    plain = start(_model(), make_config(0, **config))
    expected = [_step(plain, seed) for seed in range(2)]
    plain.destroy()
    engine = start(_model(), make_config(0, sequence={"plan": "auto"}, **config))
    planned = _planned(engine.module)
    assert config or _planned(copy.deepcopy(engine.module)) is planned
    planned._forwards, planned.choices = 9, CHOICES[name]
    with _Kernels() as kernels:
        found = [_step(engine, seed) for seed in range(2)]
    engine.destroy()
    return all(map(_equal, found, expected)), kernels.calls // 2, planned._offload.copied // 2


def test_each_choice_is_bitwise_the_plain_step(pool1: Any) -> None:
    found = {name: pool1.run(_chosen, name)[0] for name in CHOICES}
    assert {name: same for name, (same, _, _) in found.items()} == dict.fromkeys(CHOICES, True)
    twice = {name: calls for name, (_, calls, _) in found.items()}
    assert twice == {
        "kept": LAYERS, "recomputed": 2 * LAYERS, "attention spared": LAYERS, "offloaded": LAYERS,
        "in shares": LAYERS + 1,
    }  # fmt: skip
    copied = {name: copies for name, (_, _, copies) in found.items()}
    assert copied["kept"] == 0 and copied["recomputed"] == LAYERS - 1
    assert copied["attention spared"] == 2 * LAYERS - 1  # inputs and outputs of attention
    assert copied["offloaded"] > copied["attention spared"]


def test_choices_hold_beside_sequences_over_ranks(pool2: Any) -> None:
    assert [same for same, _, _ in pool2.run(_chosen, "in shares", sequence_parallel_size=2)] == [True, True]


def _auto(limit: int, steps: int = 4) -> dict[str, Any]:
    """Train by a plan; ``limit``: bytes of this rank's memory beside what it has at the start."""
    plain = start(_model(), make_config(3))
    expected = [_step(plain, seed) for seed in range(steps)]
    plain.destroy()
    model = _model()
    used = {"rss_bytes": lambda: 1000, "peak_rss_bytes": lambda: 1000}
    with mock.patch.multiple(hostmem, **used), logged(set_level=logging.INFO) as lines:
        config = make_config(3, sequence={"plan": "auto"}, memory={"host_limit": 2**40})
        engine = start(model, config)
        planned = _planned(engine.module)
        planned._memory = planned._memory.model_copy(update={"host_limit": 1000 + limit})
        with mock.patch.object(get_accelerator(), "max_memory_allocated", lambda: 1000, create=True):
            found = [_step(engine, seed) for seed in range(steps)]
    engine.destroy()
    flags = [layer.gradient_checkpointing for layer in model.model.layers]
    return {
        "same": all(map(_equal, found, expected)), "choices": planned.choices, "flags": flags,
        "said": [line for line in lines if "sequence.plan" in line], "together": planned._together,
    }  # fmt: skip


@pytest.mark.parametrize(("limit", "keeps"), [(1 << 30, {Keep.EVERYTHING}), (0, {Keep.INPUTS})])
def test_a_plan_is_made_once_by_all_ranks_and_leaves_the_numbers(pool2: Any, limit: int, keeps: set[Keep]) -> None:
    first, second = pool2.run(_auto, limit)
    assert first["same"] and second["same"] and first["choices"] == second["choices"]
    assert {choice.keep for choice in first["choices"]} == keeps
    assert not any(first["flags"]) and first["together"] == 1
    (said,) = first["said"]
    assert f"sequence.plan: of {LAYERS} blocks {LAYERS} keep " in said


def test_a_plan_between_both_keeps_some_blocks(pool1: Any) -> None:
    (found,) = pool1.run(_auto, 2 * HIDDEN * 24)
    assert found["same"] and len({choice.keep for choice in found["choices"]}) > 1, found


def _two_forwards() -> tuple[int, bool]:
    engine = start(_model(), make_config(0, sequence={"plan": "auto"}))
    planned = _planned(engine.module)
    for _ in range(2):
        torch.manual_seed(0)
        ids = torch.randint(97, (2, TOKENS))
        engine.backward(engine(input_ids=ids, labels=ids).loss + engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.destroy()
    return planned._together, planned._forwards == 4


def test_forwards_that_wait_for_one_backward_share_the_room(pool1: Any) -> None:
    assert pool1.run(_two_forwards) == [(2, True)]


def _unplanned(how: str) -> list[str]:
    model = _model()
    with logged(logging.WARNING) as lines:
        engine = start(model, make_config(1, sequence={"plan": "auto"}))
        if how == "compiled":
            engine.compile(backend="eager")
        else:
            model.activation_checkpointing_enable()
        for _ in range(2):
            _step(engine)
        engine.destroy()
    return lines


@pytest.mark.parametrize("how", ["compiled", "checkpointed since"])
def test_a_plan_that_blocks_do_not_call_is_said_once(pool1: Any, how: str) -> None:
    ((said,),) = pool1.run(_unplanned, how)
    assert "sequence.plan has no effect" in said
