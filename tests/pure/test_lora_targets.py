"""Which layers ``ds_plan --lora`` adapts, what an adapted layer is, and what is refused: without a simulation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.tools.simulate.models import Decoder, shape_of
from deepspeed.tools.simulate.plan import cli
from deepspeed.tools.simulate.plan.adapters import AdaptedLinear, Lora, adapt, chosen_layers
from tests.harness.decoders import Conv1D
from tests.harness.rows import for_each

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 8,
}  # fmt: skip


class Mixed(nn.Module):
    """Names that end alike, a layer of each kind, and no head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 6)
        self.extra_q_proj = nn.Linear(4, 6)
        self.inner = nn.ModuleDict({"q_proj": nn.Linear(6, 2), "c_attn": Conv1D(9, 3), "embed": nn.Embedding(5, 4)})


def decoder(**changes: Any) -> Decoder:
    return Decoder(shape_of(TINY | changes, "tiny"))


@for_each(
    ("targets", "chosen"),
    [
        ("q_proj", ["q_proj", "inner.q_proj"]),  # and not what only ends alike
        ("inner.q_proj", ["inner.q_proj"]),
        ("c_attn, q_proj", ["q_proj", "inner.q_proj", "inner.c_attn"]),
        (r"inner\..*", ["inner.q_proj", "inner.c_attn"]),  # what is no linear layer does not count in a pattern
        (r"(extra_)?q_proj", ["q_proj", "extra_q_proj"]),
        (r"q_proj|inner", ["q_proj"]),  # whole paths
        ("all-linear", ["q_proj", "extra_q_proj", "inner.q_proj", "inner.c_attn"]),
    ],
)
def test_targets_are_pefts(targets: str, chosen: list[str]) -> None:
    assert chosen_layers(Mixed(), targets, "mixed") == chosen


def test_all_linear_leaves_the_head_out() -> None:
    paths = chosen_layers(decoder(), "all-linear", "tiny")
    assert len(paths) == 2 * 7 and "head" not in paths
    assert chosen_layers(decoder(), "q_proj,o_proj", "tiny") == [
        f"blocks.{i}.attention.{name}" for i in range(2) for name in ("query", "out")
    ]


def test_adapters_have_the_shapes_of_the_paper_and_all_else_is_frozen() -> None:
    model = Mixed()
    adapt(model, Lora(3), "mixed")
    trained = {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    assert trained.pop("inner.c_attn.lora_A.default.weight") == (3, 3)
    assert trained.pop("inner.c_attn.lora_B.default.weight") == (9, 3)
    assert trained.pop("inner.q_proj.lora_A.default.weight") == (3, 6)
    assert trained.pop("inner.q_proj.lora_B.default.weight") == (2, 3)
    assert {name.split(".")[0] for name in trained} == {"q_proj", "extra_q_proj"} and len(trained) == 4
    assert all("base_layer" in n or "embed" in n for n, p in model.named_parameters() if not p.requires_grad)


@for_each(
    ("base", "asked", "made"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_adapters_are_as_wide_as_pefts(base: torch.dtype, asked: torch.dtype | None, made: torch.dtype) -> None:
    layer = AdaptedLinear(nn.Linear(4, 6, dtype=base), 2, asked)
    assert {p.dtype for n, p in layer.named_parameters() if "lora" in n} == {made}


@for_each(
    ("targets", "words"),
    [
        ("q_prj", ["no module is called 'q_prj'", "c_attn, extra_q_proj, q_proj"]),
        ("q_proj,,c_attn", ["no module is called ''"]),
        ("embed", ["inner.embed is no linear layer but Embedding"]),
        ("q_proj(", ["no regular expression"]),
        (r"nothing\..*", ["no module is called"]),
    ],
)
def test_a_wrong_target_is_named_beside_the_right_ones(targets: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        chosen_layers(Mixed(), targets, "mixed")
    assert all(word in str(caught.value) for word in words)


def test_what_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(UsageError, match="no layer to adapt"):
        adapt(nn.Embedding(3, 3), Lora(2), "mine")
    model = Mixed()
    adapt(model, Lora(2, "c_attn"), "mixed")
    with pytest.raises(UsageError, match=r"has adapters already \(inner.c_attn\)"):
        adapt(model, Lora(2), "mixed")
    for family in ("phi3", "gpt2"):
        with pytest.raises(UsageError, match=f"not those of '{family}'; install transformers"):
            adapt(decoder(model_type=family), Lora(2), "tiny")


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"optimizer": None}, [], 'has no block "optimizer"'),
        ({"tensor_parallel": {"autotp_size": 2}}, [], "leave out tensor_parallel"),
        ({"pipeline": {"stages": 2}}, [], "ds_simulate shows a rank of each"),
        ({"bf16": {"enabled": True}}, ["--lora_dtype", "fp32"], "trains every parameter in bf16"),
    ],
)
def test_what_does_not_go_together_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], options: list[str], words: str
) -> None:
    whole = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}} | config
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))
    assert cli.main(["--model", "no:model", "--config", str(file), "--lora", "4", *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("ds_plan: ") and words in said, said
