"""Models that were not written as a list of layers are cut by their list of blocks, as they are, and train as in one
process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.pipe import PipelineModule, cut_model
from tests.harness import pipes
from tests.harness.pool import RankPool
from tests.harness.training import outcome

pytestmark = pytest.mark.timeout(120)


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class DecoderBlock(nn.Module):
    """Attention and a feed-forward part; arguments as those of Hugging Face's decoders."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(pipes.WIDTH, 3 * pipes.WIDTH), nn.Linear(pipes.WIDTH, pipes.WIDTH)
        self.mlp = pipes.Block(5)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, positions: Tensor) -> tuple[Tensor]:
        q, k, v = (self.qkv(hidden_states) + positions).chunk(3, -1) if positions.dim() else (hidden_states,) * 3
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return (self.mlp(hidden_states + self.out(y)),)


class Body(nn.Module):
    recompute = False

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(pipes.VOCABULARY, pipes.WIDTH)
        self.embed_positions = nn.Embedding(16, pipes.WIDTH)
        self.norm = nn.LayerNorm(pipes.WIDTH)  # before the blocks in the tree, behind them in the forward
        self.layers = nn.ModuleList(DecoderBlock() for _ in range(depth))
        kinds, factors = ["near", "far", "far", "near", "far"], (1.0, 0.5, 2.0, 3.0, 0.2)
        self.config = SimpleNamespace(layer_types=kinds[:depth], factors=factors[:depth])

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        hidden = self.embed_tokens(input_ids) + self.embed_positions(places)
        mask = (places[:, None] >= places[None, :]).unsqueeze(0)
        rotary = torch.sin(places[:, None] * torch.ones(3 * pipes.WIDTH)).to(hidden.dtype)
        for i, layer in enumerate(self.layers[: len(self.layers)]):
            # A block's kind and number, by its place.
            places = (rotary if self.config.layer_types[i] == "near" else rotary / 8) * self.config.factors[i]
            if self.recompute and self.training:
                hidden = checkpoint(layer, hidden, mask, places, use_reentrant=False)[0]
            else:
                hidden = layer(hidden, attention_mask=mask, positions=places)[0]
        return self.norm(hidden)


class Decoder(nn.Module):
    """As in Hugging Face's causal language models: a body, a head that may be tied, a loss where there are labels."""

    def __init__(self, depth: int = 4, *, tied: bool = True) -> None:
        super().__init__()
        self.model, self.lm_head = Body(depth), nn.Linear(pipes.WIDTH, pipes.VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 3)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        scores = self.lm_head(self.model(input_ids))
        return Output(None if labels is None else pipes.cross_entropy(scores, labels), scores)


def _of_logits(output: Output, labels: Tensor) -> Tensor:
    return pipes.cross_entropy(output.logits, labels)


def _named(data_rank: int) -> Iterator[dict[str, Tensor]]:
    """What a data iterator yields to a model that computes its own loss."""
    return ({"input_ids": tokens, "labels": labels} for tokens, labels in pipes.batches(data_rank, micros=4))


def _cut(level: int, schedule: str, chunks: int, tied: bool) -> tuple[float, list[str]]:  # noqa: FBT001
    how = {"chunks_per_stage": chunks, "chunk_style": "v" if schedule == "zbv" else "loop"}
    module = cut_model(Decoder(tied=tied), 2, **how)
    engine = pipes.start(module, pipes.config(level, 4, pipeline={"schedule": schedule, "chunks_per_stage": chunks}))
    run, ways = pipes.trained(engine, _named(engine.mesh.data.index)), dist.get_world_size() // 2
    return pipes.worst(run, pipes.plain_run(Decoder(tied=tied), data_ranks=ways, loss_fn=_of_logits)), sorted(run[2])


@pytest.mark.in_make_test("0-1f1b-1-True", "3-interleaved-2-True", "2-zero_bubble-1-True")
@pytest.mark.parametrize(
    ("level", "schedule", "chunks", "tied"),
    [(0, "1f1b", 1, True), (3, "1f1b", 1, False), (3, "interleaved", 2, True), (2, "zero_bubble", 1, True)],
)
def test_a_decoder_is_cut_by_its_blocks(pool2: RankPool, level: int, schedule: str, chunks: int, *, tied: bool) -> None:
    errors, names = zip(*pool2.run(_cut, level, schedule, chunks, tied), strict=True)
    assert max(errors) <= 1e-6
    whole = {name for name, _ in Decoder(tied=tied).named_parameters()}
    assert set(names[0]) | set(names[1]) == whole
    assert set(names[0]) & set(names[1]) == ({"model.embed_tokens.weight"} if tied else set())
    blocks = [{name.split(".")[2] for name in part if ".layers." in name} for part in names]
    assert blocks == ([{"0", "1"}, {"2", "3"}] if chunks == 1 else [{"0", "2"}, {"1", "3"}])


def test_on_four_ranks(pool4: RankPool) -> None:
    assert max(error for error, _ in pool4.run(_cut, 3, "zbv", 2, True)) <= 1e-6


def _recomputed(schedule: str, chunks: int) -> float:
    Body.recompute = True
    try:
        return _cut(3, schedule, chunks, False)[0]
    finally:
        Body.recompute = False


@pytest.mark.in_make_test("interleaved-2")  # under 1f1b test_sequence_axes.py recomputes blocks
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_blocks_that_are_recomputed_are_given_what_their_forward_was(
    pool2: RankPool, schedule: str, chunks: int
) -> None:
    """The first block of a chunk is given what the stage before has sent, in its recomputation too."""
    assert max(pool2.run(_recomputed, schedule, chunks)) <= 1e-6


class Scaled(nn.Module):
    """A parameter of the model's own before and behind its blocks, and another name that begins as its name does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(pipes.VOCABULARY, pipes.WIDTH), pipes.Head(2)
        self.blocks = nn.ModuleList(pipes.Block(seed) for seed in range(4))
        self.scale, self.scale_more = nn.Parameter(torch.linspace(0.5, 1, pipes.WIDTH)), nn.LayerNorm(pipes.WIDTH)
        with torch.no_grad():
            self.embed.weight.copy_(pipes.Embed(1).weight)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.scale_more(hidden) * self.scale)


class Tempered(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return pipes.cross_entropy(output / self.temperature, labels)


def _on_all_stages(level: int, schedule: str, *, cut: bool) -> tuple[float, list[str]]:
    plain: nn.Module = Scaled() if cut else pipes.Plain(pipes.layers())
    plain.loss_fn = Tempered()
    wanted = pipes.plain_run(plain, loss_fn=plain.loss_fn)
    loss = Tempered()
    module = cut_model(Scaled(), 2, loss_fn=loss) if cut else PipelineModule(pipes.layers(), 2, loss_fn=loss)
    engine = pipes.start(module, pipes.config(level, 4, pipeline={"schedule": schedule}))
    run = pipes.trained(engine, pipes.batches(0, micros=4))
    return pipes.worst(run, wanted), sorted(run[2])


@pytest.mark.in_make_test("3-zero_bubble-True", "3-zero_bubble-False")
@pytest.mark.parametrize(
    ("level", "schedule", "cut"), [(0, "1f1b", True), (3, "zero_bubble", True), (3, "zero_bubble", False)]
)
def test_a_parameter_that_all_stages_hold_is_one(pool2: RankPool, level: int, schedule: str, *, cut: bool) -> None:
    """One of the outermost model, or of the loss: the first stage saves it, whichever has trained it."""
    errors, names = zip(*pool2.run(_on_all_stages, level, schedule, cut=cut), strict=True)
    assert max(errors) <= 1e-6
    on_all = {"scale"} if cut else {"loss_fn.temperature", "tied_modules.embed.weight"}
    assert set(names[0]) & set(names[1]) == on_all


def _modes() -> list[bool]:
    model, seen = Decoder(), list[bool]()
    model.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    engine = pipes.start(cut_model(model.eval(), 2), pipes.config(0, 1))
    for run in (engine.train_batch, engine.eval_batch, engine.train_batch):
        run(_named(0))
    engine.destroy()
    return seen


def test_the_outermost_model_trains_and_evaluates_as_its_parts_do(pool2: RankPool) -> None:
    assert pool2.run(_modes) == [[True, False, True]] * 2


def _sixteen_bits() -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    module = cut_model(Decoder(tied=False), 2)
    for block in module.model.layers:
        block.register_forward_pre_hook(lambda _, __, given: seen.append(given["positions"].dtype), with_kwargs=True)
    engine = pipes.start(module, pipes.config(0, 4, bf16={"enabled": True}))
    assert bool(torch.isfinite(engine.train_batch(_named(0))))
    engine.destroy()
    return seen


def test_what_a_model_makes_in_its_activations_dtype_has_it_on_every_stage(pool2: RankPool) -> None:
    """Positions are made from an embedding, of which later stages have the shape alone, in the dtype of the weights."""
    for seen in pool2.run(_sixteen_bits):
        assert seen and set(seen) == {torch.bfloat16}


def _refused() -> list[str]:
    module, routed, both = cut_model(Decoder(), 2), Decoder(), Decoder()
    routed.config = SimpleNamespace(output_router_logits=True)
    both.config = SimpleNamespace(is_encoder_decoder=True)
    wrong = pipes.config(0, 4, pipeline={"schedule": "interleaved", "chunks_per_stage": 2})
    return [
        outcome(lambda: cut_model(nn.Linear(2, 2), 2)),
        outcome(lambda: cut_model(Decoder(1), 2, blocks="model.layers")),
        outcome(lambda: pipes.start(module, wrong)),
        outcome(lambda: cut_model(routed, 2)),
        outcome(lambda: cut_model(routed, 1)),
        outcome(lambda: cut_model(both, 2)),
    ]


def test_what_cannot_be_cut_is_refused(pool2: RankPool) -> None:
    for none, few, again, routers, whole, both in pool2.run(_refused):
        assert "Linear has no nn.ModuleList of blocks" in none
        assert "1 layers cannot be dealt out to 2" in few
        assert "is cut once: pass chunks_per_stage" in again
        assert "a loss over the routers of all blocks, and a stage has some of them" in routers and not whole
        assert "Decoder has the blocks of an encoder and of a decoder" in both


def _two_values() -> str:
    model = Decoder()
    model.model.config.factors = tuple(torch.ones(4, requires_grad=True))  # positions are made from them
    engine = pipes.start(cut_model(model, 2), pipes.config(0, 1))
    text = outcome(lambda: engine.train_batch(_named(0)))
    engine.destroy()
    return text


def test_blocks_that_hand_on_more_than_one_value_with_a_gradient_are_refused(pool2: RankPool) -> None:
    for text in pool2.run(_two_values):
        assert "a second value with a gradient (argument 'positions')" in text
