"""Transformers models under zero.Init: from_config, from_pretrained, resized embeddings, and training what came out."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.compat.common import (
    LR,
    alive,
    apart,
    batches,
    everything,
    forget_clients,
    llama,
    llama_config,
    losses_of,
    mean_over_ranks,
    mine,
    need,
    plain_run,
    save_once,
    sentences,
    settings,
    weights_apart,
    whole,
    zero_block,
)
from tests.harness.logs import logged
from tests.harness.pool import RankPool

need("accelerate", "transformers")
pytestmark = pytest.mark.timeout(180)
STEPS = 3


ADAM = {"lr": LR, "eps": 1e-2, "weight_decay": 0.1}


def config(stage: int = 3, **changes: Any) -> dict[str, Any]:
    return settings(stage, ADAM, gradient_clipping=0.0, **changes)


def train(model: nn.Module, content: dict[str, Any], data: list[dict[str, Tensor]]) -> tuple[Any, list[float]]:
    import deepspeed

    engine = deepspeed.initialize(model=model, config=content)[0]
    return engine, mean_over_ranks(losses_of(engine, mine(data)))


def reference(model: nn.Module, data: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    return plain_run(model, optimizer, data, per_step=dist.get_world_size()), whole(model)


def data_of() -> list[dict[str, Tensor]]:
    return batches(sentences(2 * STEPS * dist.get_world_size()))


def saved_model(folder: str, **changes: Any) -> nn.Module:
    """A random plain model, written to ``folder`` by the first rank."""
    forget_clients()
    model = llama(**changes)
    save_once(model, folder)
    return model


def pretrained(folder: str, tied: bool) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from deepspeed.zero.param import ReleasedFace

    plain = saved_model(folder, tie_word_embeddings=tied)
    losses, weights = reference(plain, data_of())
    content = config()
    keep = alive(content)
    model = AutoModelForCausalLM.from_pretrained(folder)
    fresh = whole_saved(folder, tied)
    facts = {
        "sharded": all(hasattr(p, "ds_id") for p in model.parameters()),
        "released": dist.get_world_size() == 1 or isinstance(model.model.layers[0].mlp.up_proj.weight, ReleasedFace),
        "tied": (model.lm_head.weight is model.model.embed_tokens.weight) == tied,
        "mode": not model.training,
    }
    loaded = weights_apart(model, fresh)
    engine, found = train(model.train(), content, data_of())
    result = {"facts": facts, "loaded": loaded, "loss": apart(found, losses), "weights": weights_apart(model, weights)}
    engine.destroy()
    del keep
    return result


def whole_saved(folder: str, tied: bool) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    weights = load_file(Path(folder) / "model.safetensors")
    return weights if not tied else {"lm_head.weight": weights["model.embed_tokens.weight"], **weights}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_from_pretrained_is_born_sharded_with_the_saved_values(tied: bool, tmp_path: Path, pool: RankPool) -> None:
    for found in pool.run(pretrained, str(tmp_path), tied, time_limit=90):
        assert all(found["facts"].values()), found["facts"]
        assert found["loaded"] == 0.0
        assert found["loss"] < 1e-5 and found["weights"] < 1e-5


def random_init() -> dict[str, Any]:
    """Weights initialised by Transformers itself under zero.Init look like its plain ones, and equal on every rank."""
    from transformers import AutoModelForCausalLM, GPT2Config

    gpt2 = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    result = {}
    for name, made in {"llama": llama_config(), "gpt2": gpt2}.items():
        forget_clients()
        torch.manual_seed(3)
        plain = whole(AutoModelForCausalLM.from_config(made))
        keep = alive(config(bf16={"enabled": True}))
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(made)
        named = dict(model.named_parameters())
        result[name] = {
            "names": set(named) == set(plain),
            "shapes": all(p.ds_shape == plain[n].shape for n, p in named.items()),
            "dtype": {str(p.dtype) for p in named.values()},
            "positions": all(b.dtype is torch.float32 for n, b in model.named_buffers() if n.endswith("inv_freq")),
        }
        values = {n: value.float() for n, value in everything(model).items()}
        result[name]["spread"] = max(abs(float(v.std() - plain[n].std())) for n, v in values.items() if v.dim() == 2)
        result[name]["constant"] = all(torch.equal(v, plain[n]) for n, v in values.items() if v.dim() == 1)
        digest = torch.stack([v.double().sum() for v in values.values()])
        other = digest.clone()
        dist.broadcast(other, 0)
        result[name]["agree"] = bool(torch.equal(digest, other))
        del keep, model
    return result


def test_from_config_initialises_like_plain_transformers(pool2: RankPool) -> None:
    for found in pool2.run(random_init, time_limit=90):
        for name, facts in found.items():
            assert facts.pop("dtype") == {"torch.bfloat16"}, name
            assert facts.pop("spread") < 0.01, (name, facts)
            assert all(facts.values()), (name, facts)


def around_a_part() -> float:
    """A model of one's own around a part that Transformers has initialised in shards: how far that moves the part."""
    from transformers import AutoModel, PreTrainedModel

    class Around(PreTrainedModel):
        def __init__(self, made: Any) -> None:
            super().__init__(made)
            self.body = AutoModel.from_config(made)
            self.before = everything(self.body)
            self.head = nn.Linear(32, 3)
            self.post_init()

    keep = alive(config())
    made = Around(llama_config(attn_implementation="eager"))
    del keep
    return weights_apart(made.body, made.before)


def test_a_model_around_a_part_in_shards_keeps_its_values(pool2: RankPool) -> None:
    assert pool2.run(around_a_part, time_limit=90) == [0.0, 0.0]


def resized(folder: str) -> dict[str, Any]:
    """More tokens than the saved model has: old rows keep their values, training goes on."""
    from transformers import AutoModelForCausalLM

    import deepspeed

    plain = saved_model(folder)
    old = whole(plain)
    keep = alive(config())
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(70, mean_resizing=False)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with deepspeed.zero.GatheredParameters([table, head]):
        kept = torch.equal(table[:64], old["model.embed_tokens.weight"]) and torch.equal(
            head[:64], old["lm_head.weight"]
        )
        start = {n: p.detach().clone() for n, p in (("model.embed_tokens.weight", table), ("lm_head.weight", head))}
        shapes = (tuple(table.shape), tuple(head.shape))
    plain.resize_token_embeddings(70, mean_resizing=False)
    with torch.no_grad():
        for name, param in plain.named_parameters():
            if name in start:
                param.copy_(start[name])
    losses, weights = reference(plain, data_of())
    engine, found = train(model.train(), config(), data_of())
    result = {"kept": kept, "shapes": shapes, "loss": apart(found, losses), "weights": weights_apart(model, weights)}
    engine.destroy()
    forget_clients()
    del keep
    return result


@pytest.mark.parametrize("world", [1, 2])
def test_resized_embeddings_keep_old_rows_and_train(tmp_path: Path, pool: RankPool) -> None:
    for found in pool.run(resized, str(tmp_path), time_limit=90):
        assert found["kept"] and found["shapes"] == ((70, 32), (70, 32))
        assert found["loss"] < 1e-5 and found["weights"] < 1e-5


def checkpointed(stage: int, reentrant: bool) -> dict[str, float]:
    """Gradient checkpointing through the engine, which hands the call to the model."""
    import deepspeed

    forget_clients()
    losses, weights = reference(llama(), data_of())
    engine = deepspeed.initialize(model=llama(), config=config(stage))[0]
    engine.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    engine.train()
    found = losses_of(engine, mine(data_of()))
    result = {"loss": apart(mean_over_ranks(found), losses), "weights": weights_apart(engine.module, weights)}
    engine.destroy()
    return result


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_checkpointing_changes_nothing(stage: int, reentrant: bool, pool2: RankPool) -> None:
    for found in pool2.run(checkpointed, stage, reentrant, time_limit=90):
        assert max(found.values()) < 1e-5, found


def generating() -> bool:
    """``engine.generate`` under sharded parameters equals the plain model's."""
    import deepspeed

    forget_clients()
    prompt = sentences(2)[0]["input_ids"][None, :4]
    expected = llama().eval().generate(prompt, max_new_tokens=6, do_sample=False)
    engine = deepspeed.initialize(
        model=llama().eval(), config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero_block(3)}
    )[0]
    found = engine.generate(prompt, max_new_tokens=6, do_sample=False, synced_gpus=True)
    engine.destroy()
    return bool(torch.equal(expected, found))


def test_generation_under_sharded_parameters(pool2: RankPool) -> None:
    assert all(pool2.run(generating, time_limit=90))


def family(kind: str) -> tuple[type[nn.Module], Any, Any]:
    """(model class, its tiny configuration, what one row of ``sentences`` becomes for it)."""
    import transformers as t

    if kind == "mixtral":
        sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
        plain = llama_config().to_dict()
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        plain = {n: plain[n] for n in (*names, "num_key_value_heads")}
        return t.MixtralForCausalLM, t.MixtralConfig(**plain, **sizes), lambda batch: batch
    if kind == "t5":
        sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        made = t.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
        return t.T5ForConditionalGeneration, made, lambda batch: batch
    if kind == "bert":  # its head is tied, and its bias is fitted to the head while both are in shards
        sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return t.BertForMaskedLM, t.BertConfig(**sizes, **still, intermediate_size=48), lambda batch: batch
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    still = dict.fromkeys((*rates, "layerdrop", "mask_time_prob"), 0.0)
    waves = {"conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_conv_pos_embeddings": 8}
    waves |= {"num_conv_pos_embedding_groups": 4, "intermediate_size": 48, "ctc_loss_reduction": "mean"}
    made = t.Wav2Vec2Config(**sizes, **still, **waves)

    def sound(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        pitches = 0.01 + 0.001 * batch["input_ids"][:, :1]
        return {"input_values": torch.sin(torch.arange(400) * pitches), "labels": batch["labels"][:, :4]}

    return t.Wav2Vec2ForCTC, made, sound


def from_config_of_openai() -> tuple[list[str], float, list[str], float]:
    """What is said, and the loss, of a model by ``from_config`` and of one by its class."""
    import transformers

    import deepspeed

    made = transformers.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0)
    keep = alive(config())
    found: list[Any] = []
    for by_class in (False, True):
        with logged(logging.WARNING) as said:
            if by_class:
                with deepspeed.zero.Init(config_dict_or_path=config()):
                    model = transformers.OpenAIGPTLMHeadModel(made)
            else:
                model = transformers.AutoModelForCausalLM.from_config(made)
            engine, losses = train(model.train(), config(), data_of())
        engine.destroy()
        found += [[text for text in said if "never initialised" in text], losses[-1]]
    forget_clients()
    del keep
    return tuple(found)


def test_weights_that_from_config_leaves_out_are_named(pool2: RankPool) -> None:
    for rank, (said, _, again, loss) in enumerate(pool2.run(from_config_of_openai, time_limit=90)):
        assert rank or (len(said) == 1 and "8 parameters" in said[0] and "h.0.attn.c_attn.weight" in said[0])
        assert not again and 0 < loss < 5


def family_trained(kind: str, folder: str) -> dict[str, Any]:
    """A pretrained folder of that family, loaded in shards and trained at stage 3."""
    cls, made, adapt = family(kind)
    forget_clients()
    torch.manual_seed(12)
    plain = cls(made).train()
    save_once(plain, folder)
    data = [adapt(batch) for batch in data_of()]
    start = whole(plain)
    losses, weights = reference(plain, data)
    keep = alive(config())
    model = cls.from_pretrained(folder)
    loaded = weights_apart(model, start)
    engine, found = train(model.train(), config(), data)
    result = {"loaded": loaded, "loss": apart(found, losses), "weights": weights_apart(model, weights)}
    engine.destroy()
    forget_clients()
    del keep
    return result


@pytest.mark.parametrize("kind", ["mixtral", "t5", "bert", "wav2vec2"])
def test_other_families_load_and_train(kind: str, tmp_path: Path, pool2: RankPool) -> None:
    for found in pool2.run(family_trained, kind, str(tmp_path), time_limit=90):
        assert found["loaded"] < 1e-6 and found["loss"] < 1e-5 and found["weights"] < 2e-5, found
