"""The hybrid engine over models of transformers and PEFT, called as DeepSpeed-Chat calls it: tokens of plain torch, and
training as if nothing had been generated.
"""

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.errors import RankFailedError, UsageError
from tests.compat.common import VOCABULARY, everything, llama, need
from tests.compat.test_weights_out import ADAPTERS, engine_of, peft_model, trained
from tests.harness.pool import RankPool
from tests.harness.training import outcome

need("peft", "transformers")
pytestmark = pytest.mark.timeout(180)


def build(kind: str) -> nn.Module:
    return peft_model(kind) if kind in ADAPTERS else llama()


def generated(kind: str, stage: int, pinned: bool) -> list[str]:
    """What of the generations, and of the training after them, is not plain torch's."""
    wrong, silent = list[str](), dict[str, Tensor]()
    for generates in (False, True):
        engine = engine_of(build(kind), stage, hybrid_engine={"enabled": True, "pin_parameters": pinned})
        trained(engine)
        if generates:
            before, plain = everything(engine.module), build(kind)
            plain.load_state_dict({**plain.state_dict(), **before})
            plain = plain.merge_and_unload() if pinned and kind in ADAPTERS else plain
            engine.eval()
            plain.eval()
            for length in (2 + 5 * dist.get_rank(), 4):
                options: dict[str, Any] = {"max_new_tokens": length, "do_sample": False}
                ids = torch.arange(3, 8 + dist.get_rank()).view(1, -1)
                theirs = plain.generate(input_ids=ids, **options)
                # DeepSpeed-Chat calls the module's and says whether ranks are to wait for each other
                ours = engine.module.generate(input_ids=ids, synced_gpus=stage == 3, **options)
                wrong += [] if torch.equal(ours, theirs) else [f"{ours} for {theirs}"]
            after = everything(engine.module)
            wrong += [name for name in before if not torch.equal(before[name], after[name])]
            wrong += [n for n, m in engine.module.named_modules() if getattr(m, "merged_adapters", [])]
            engine.train()
        trained(engine)
        weights = everything(engine.module)
        if generates:
            wrong += [f"{n} trains differently" for n in weights if not torch.equal(weights[n], silent[n])]
        silent |= weights
        engine.destroy()
    return wrong


@pytest.mark.parametrize(
    ("kind", "stage", "pinned"),
    [
        *(("plain", 2, True), ("plain", 3, True), ("plain", 3, False)),
        *(("lora", 1, True), ("lora", 3, True), ("lora", 3, False)),
        *((kind, 3, True) for kind in ("dora", "embeddings", "a head beside")),
    ],
)
def test_the_hybrid_engine_generates_as_plain_torch(pool2: RankPool, kind: str, stage: int, pinned: bool) -> None:
    for wrong in pool2.run(generated, kind, stage, pinned):
        assert wrong == []


def gpt2() -> nn.Module:
    """Positions are learnt, queries, keys and values packed, the embedding tied."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(12)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **ends))


def shared_layers(kind: str, stage: int) -> tuple[list[str], list[int]]:
    """What the two ranks that share layers do not generate as plain torch; forwards of each generation."""
    built, wrong, forwards, rank = {"llama": llama, "gpt2": gpt2}[kind], list[str](), list[int](), dist.get_rank()
    engine = engine_of(built(), stage, hybrid_engine={"enabled": True, "inference_tp_size": 2})
    trained(engine)
    plain = built()
    plain.load_state_dict({**plain.state_dict(), **everything(engine.module)}, strict=False)
    plain.tie_weights()
    engine.eval()
    plain.eval()
    of_rank = [torch.stack([torch.arange(3, 8 + r), torch.arange(20 + r, 15, -1)]) for r in (0, 1)]
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    end = int(plain.generate(of_rank[0], **greedy)[0, 5 + 2])  # what rank 0 says third ends a row
    filled = torch.nn.functional.pad(of_rank[rank], (1, 0))
    calls: list[tuple[Tensor, dict[str, Any]]] = [
        (of_rank[rank], greedy),
        (of_rank[rank], {**greedy, "eos_token_id": end}),
        (of_rank[rank][:, :5], {**greedy, "max_new_tokens": 3}),
        (filled, greedy),
        (filled, {**greedy, "attention_mask": (filled > 0).long(), "use_cache": False}),
        (of_rank[rank], {"max_length": 12, "do_sample": False}),
        (of_rank[rank], {**greedy, "num_beams": 2}),
        (of_rank[rank], {"max_new_tokens": 4, "do_sample": True, "num_beams": 1 + rank}),
    ]
    engine.module.register_forward_hook(lambda *_: forwards.append(1))
    counts = list[int]()
    for ids, options in calls:
        forwards.clear()
        torch.manual_seed(rank)
        theirs = plain.generate(ids, **options)
        torch.manual_seed(rank)
        ours = engine.generate(ids, **options)
        wrong += [] if torch.equal(ours, theirs) else [f"{options}: {ours} for {theirs}"]
        counts.append(len(forwards))
    trained(engine)
    engine.destroy()
    return wrong, counts


@pytest.mark.parametrize(("kind", "stage"), [("llama", 3), ("gpt2", 1)])
def test_ranks_that_share_layers_generate_as_plain_torch(pool2: RankPool, kind: str, stage: int) -> None:
    for wrong, counts in pool2.run(shared_layers, kind, stage):
        assert wrong == []
        assert counts[0] == 16  # those of both ranks


def adapters_in_parts() -> str:
    return outcome(lambda: engine_of(build("lora"), 3, hybrid_engine={"enabled": True, "inference_tp_size": 2}))


def test_adapters_are_refused_by_name_where_ranks_share_layers(pool2: RankPool) -> None:
    for said in pool2.run(adapters_in_parts):
        assert "has an adapter, and such layers are not dealt out" in said


def lengths_of_configurations() -> list[str]:
    kind = importlib.import_module("transformers").GenerationConfig
    engine = engine_of(llama(), 3, hybrid_engine={"enabled": True, "max_out_tokens": 12})
    ids = torch.arange(3, 8).view(1, -1)
    calls: list[dict[str, Any]] = [
        {"max_length": 12},
        {"max_new_tokens": 7},
        {"max_length": 13},
        {"max_new_tokens": 8},
        {"generation_config": kind(max_new_tokens=9)},
        {"max_new_tokens": 7 + dist.get_rank()},
        {},  # of a configuration that says nothing, either
        {"generation_config": kind(do_sample=False)},
    ]
    said = [outcome(lambda call=call: engine.generate(ids, do_sample=False, **call)) for call in calls]
    engine.destroy()
    return said


def test_lengths_are_those_of_the_call_or_of_the_models_configuration(pool2: RankPool) -> None:
    for rank, said in enumerate(pool2.run(lengths_of_configurations)):
        assert said[:2] == ["", ""]
        assert all(UsageError.__name__ in text and "max_out_tokens is 12" in text for text in said[2:5])
        assert (UsageError if rank else RankFailedError).__name__ in said[5]
        assert all("up to 20 new ones are 25" in text for text in said[6:]), said[6:]


def implicit_lengths() -> tuple[int, int, str]:
    """Tokens that come where nobody says how many, with room for them, and near the end of the model's positions."""
    engine = engine_of(llama(), 3, hybrid_engine={"enabled": True, "max_out_tokens": 25})
    engine.module.generation_config.eos_token_id = None
    ids, most = torch.arange(3, 8).view(1, -1), engine.module.config.max_position_embeddings
    made = engine.generate(ids, do_sample=False).shape[1]
    engine.module.config.max_position_embeddings = 9
    few = engine.generate(ids, do_sample=False).shape[1]
    engine.module.config.max_position_embeddings = most
    said = outcome(lambda: engine.generate(torch.arange(3, 9).view(1, -1), do_sample=False))
    engine.destroy()
    return made, few, said


def test_transformers_limit_counts_where_nobody_gives_one(pool2: RankPool) -> None:
    for made, few, said in pool2.run(implicit_lengths):
        assert (made, few) == (25, 9) and "up to 20 new ones are 26" in said
