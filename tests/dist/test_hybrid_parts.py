"""Ranks that share every layer while they generate, and not while they train: tokens are those of plain torch, each
rank's own, and training goes on bit for bit as if nothing had been generated.
"""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, NotYetError, RankFailedError, UsageError
from deepspeed.reallocate.adapters import adapted_layer
from deepspeed.tools.verify.grads import full_parameters
from tests.dist.test_hybrid_engine import (
    END,
    VOCABULARY,
    WIDTH,
    ZERO,
    Adapted,
    Apart,
    Around,
    Speaker,
    config,
    like_plain_torch,
    prompt,
    speaker,
    take_over,
    train,
)
from tests.harness.decoders import GPT2, Llama
from tests.harness.lockstep import equal, not_at_rest
from tests.harness.pool import RankPool
from tests.harness.spy import CollectiveSpy
from tests.harness.training import outcome, start

pytestmark = pytest.mark.timeout(120)
FILL = 1


class Decoder(Llama):
    """Attention of few heads of keys, a gated layer, a cut vocabulary."""

    generate = Speaker.generate
    fails_after = -1


class Tied(Decoder):
    def __init__(self) -> None:
        super().__init__(tied=True, bias=True, head_norms=True)


class Counted(Speaker):
    """Has a buffer that each rank's forward changes in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.shift += torch.bincount(ids.flatten(), minlength=VOCABULARY) / 100
        return super().forward(ids) + self.shift


Case = tuple[int, dict[str, Any], type[nn.Module]]
CASES: dict[str, Case] = {
    "0, decoder": (0, {}, Decoder),
    "2": (2, {"pin_parameters": False, "release_inference_cache": True}, Speaker),
    "3, decoder": (3, {"zero": ZERO}, Decoder),
    "1, decoder": (1, {}, Tied),
    "1, a part generates": (1, {}, Around),
    "3, a part generates": (3, {"zero": ZERO}, Around),
    "3, on the host": (3, {"zero": {**ZERO, "offload_param": {"device": "cpu"}}}, Tied),
    "3, some whole": (3, {"pin_parameters": False}, Decoder),
    "1, by itself": (1, {}, Apart),
}


def shared(stage: int, options: dict[str, Any], kind: type[nn.Module], ways: int = 2) -> None:
    like_plain_torch(stage, {**options, "inference_tp_size": ways}, kind)


@pytest.mark.in_make_test("2", "3, decoder")
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_generate_as_plain_torch_and_train_as_without(pool2: RankPool, name: str) -> None:
    pool2.run(shared, *CASES[name])


def test_two_groups_of_two_ranks_generate_each_for_its_prompts(pool4: RankPool) -> None:
    pool4.run(shared, 3, {"zero": ZERO}, Tied)


def otherwise_made(how: str, folder: str) -> None:
    """A model that is born in shards, whose weights rest on a drive, that is compiled, or whose updates come late."""
    drive = {"device": "nvme", "nvme_path": folder}
    zero = {**ZERO, "offload_param": {**drive, "max_in_cpu": 0}} if how == "on a drive" else ZERO
    zero = {"offload_optimizer": {"device": "cpu", "delayed_update": True}} if how == "late" else zero
    settings = config(2 if how == "late" else 3, zero=zero, inference_tp_size=2)
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=how == "born in shards"):
        model = speaker(Tied)
    engine, plain = start(model, settings), speaker(Tied)
    if how == "compiled":
        engine.compile(backend="eager")
    for step in range(2):
        train(engine, step)
        found = engine.generate(prompt(dist.get_rank()))
        take_over(plain, full_parameters(engine.module))
        with torch.no_grad():
            expected = plain.generate(prompt(dist.get_rank()))
        assert torch.equal(found, expected), f"{found} for {expected}"
        assert not_at_rest(engine) == []
    engine.destroy()


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["born in shards", "on a drive", "compiled", "late"])
def test_models_made_otherwise_generate_as_plain_torch(pool2: RankPool, how: str, tmp_path: Path) -> None:
    pool2.run(otherwise_made, how, str(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_generate_as_plain_torch_in_more_settings(pool4: RankPool, name: str, ways: int) -> None:
    pool4.run(shared, *CASES[name], ways)


# -- in turn ----------------------------------------------------------------------------------------------------------
class Settings:
    """A generation configuration."""

    def __init__(self, **changes: Any) -> None:
        self.changes = {"eos_token_id": END, "pad_token_id": FILL, **changes}
        vars(self).update(self.changes)

    def to_dict(self) -> dict[str, Any]:
        return {"max_length": 20, **self.changes}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.changes


class GenerationMixin:
    """Generates as the class of this name in Transformers: rows end for themselves, and are filled up then."""

    generation_config = Settings()

    def generate(self: Any, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Tensor:
        ids, mask = kwargs.get("input_ids", inputs), kwargs.get("attention_mask")
        assert ids is not None
        mask = (ids != FILL).to(ids) if mask is None else mask
        goes_on = torch.ones(len(ids), dtype=torch.bool)
        for _ in range(kwargs.get("max_new_tokens", 4)):
            logits = self(ids, mask)[:, -1]
            drawn = kwargs.get("do_sample", False)
            token = torch.multinomial(logits.softmax(-1), 1)[:, 0] if drawn else logits.argmax(-1)
            token = token.masked_fill(~goes_on, FILL)
            ids, mask = torch.cat([ids, token[:, None]], 1), torch.cat([mask, mask.new_ones(len(ids), 1)], 1)
            goes_on &= token != END
            if not goes_on.any():
                break
        return ids


class Masked(GenerationMixin, Speaker):
    """Next tokens from the sum over those before that the mask has."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(ids) if mask is None else mask
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(x)).mul(mask[..., None]).cumsum(1) / 3)
        return self.head(x)


def several_calls() -> None:
    """Calls whose tokens, and whose random numbers, are to be plain torch's."""
    rank = dist.get_rank()
    engine, plain = start(speaker(Masked), config(3, zero=ZERO, inference_tp_size=2)), speaker(Masked)
    train(engine, 0)
    plain.load_state_dict(full_parameters(engine.module))
    engine.eval()
    generator = torch.Generator().manual_seed(3 + rank)
    short, long = (torch.randint(2, VOCABULARY, (2 + rank, 3 + 2 * rank * n), generator=generator) for n in (0, 1))
    filled = torch.cat([torch.full((2 + rank, 1), FILL), long], 1)
    calls: list[tuple[Tensor, dict[str, Any]]] = [
        (short, {"max_new_tokens": 9}),
        (long, {"max_new_tokens": 9}),  # rows of one rank end before those of the other
        (filled, {"max_new_tokens": 5, "generation_config": Settings()}),
        (filled, {"max_new_tokens": 5, "attention_mask": torch.ones_like(filled)}),
        (short, {"generation_config": Settings(pad_token_id=None)}),
        (long, {"max_new_tokens": 3 + rank}),
        (long, {"generation_config": Settings()}),
        (long, {"max_new_tokens": 5, "do_sample": True, "output_scores": 1}),
    ]
    for ids, options in calls:
        torch.manual_seed(7 + rank)
        with torch.no_grad():
            expected = plain.generate(ids, **options)
        after = torch.get_rng_state()
        torch.manual_seed(7 + rank)
        found = engine.generate(ids, **options)
        assert torch.equal(found, expected), f"{options}: {found} for {expected}"
        assert torch.equal(after, torch.get_rng_state()), f"{options}: other numbers were drawn"
    engine.destroy()


def test_each_rank_gets_for_its_own_prompts_what_it_would_alone(pool2: RankPool) -> None:
    pool2.run(several_calls)


# -- weights ----------------------------------------------------------------------------------------------------------
def moves(stage: int) -> tuple[list[int], list[bool]]:
    """How often weights have come to the parts, and whether these have memory, after each call."""
    engine, plain = start(speaker(Counted), config(stage, zero=ZERO, inference_tp_size=2)), speaker(Counted)
    parts, counts, memory = engine._in_parts, list[int](), list[bool]()
    before, take = list[Any](), parts.take
    parts.take = lambda *args: (before.append(1), take(*args))
    ids = prompt(0)

    def generate() -> None:
        state = engine.module.state_dict()
        shift = state["shift"].clone()
        dist.broadcast(shift, 0)  # buffers are the first rank's
        plain.load_state_dict({**full_parameters(engine.module), "shift": shift})
        engine.eval()
        plain.eval()
        with torch.no_grad():
            expected = plain.generate(ids)
        with torch.inference_mode(mode=not counts):
            found = engine.generate(ids)
        assert torch.equal(found, expected), f"turn {len(counts)}: {found} for {expected}"
        engine.train()
        counts.append(len(before))
        memory.append(parts.filled)

    def write() -> None:
        state = {name: values * 1.5 for name, values in full_parameters(engine.module).items()}
        engine.load_module_state_dict({**state, "shift": engine.module.shift})

    def edit() -> None:
        if stage < 3:  # as torch's version counters do not see it
            engine.module.head.weight.data.mul_(-1)

    def away() -> None:
        engine.offload_states()
        memory.append(parts.filled)
        engine.reload_states()

    for change in (int, int, lambda: train(engine, 0), write, edit, away):
        change()
        generate()
    assert not_at_rest(engine) == []
    engine.destroy()
    return counts, memory


@pytest.mark.in_make_test("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_move_when_they_have_changed_however_that_was(pool2: RankPool, stage: int) -> None:
    for counts, memory in pool2.run(moves, stage):
        assert counts == [1, 1, 2, 3, 3 + (stage < 3), 4 + (stage < 3)]
        assert memory == [True] * 5 + [False, True]


def sizes(pinned: bool) -> tuple[int, int]:
    """Bytes of the parts in a generation and after it; the engine's end leaves nothing."""
    module = speaker(Decoder)
    groups, modules = len(dist.distributed_c10d._world.pg_map), dict(module.named_modules())
    engine = start(module, config(3, zero=ZERO, inference_tp_size=2, pin_parameters=pinned))
    weak, seen = weakref.ref(engine._in_parts), list[int]()
    module.model.norm.register_forward_hook(lambda *_: seen.append(memory_of(weak())))
    with CollectiveSpy() as spy:
        engine.generate(prompt(dist.get_rank()), max_new_tokens=2)
    assert spy.count("all_reduce") >= 2 * 2 * 2 * 2, "no layer was shared"  # turns, tokens, blocks, layers
    after = memory_of(weak())
    engine.destroy()
    del engine
    gc.collect()
    assert weak() is None, "the parts live"
    assert len(dist.distributed_c10d._world.pg_map) == groups, "a group lives"
    assert dict(module.named_modules()) == modules
    assert not [n for n, p in module.named_parameters() if hasattr(p, "tp_place")]
    return max(seen), after


def memory_of(parts: Any) -> int:
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parts._parts.values()}
    return sum(storages.values())


@pytest.mark.in_make_test("False")
@pytest.mark.parametrize("pinned", [True, False])
def test_parts_take_their_share_of_memory_and_give_it_back(pool2: RankPool, pinned: bool) -> None:
    whole = sum(p.numel() * 4 for p in Decoder().parameters())
    for inside, after in pool2.run(sizes, pinned):
        assert 0.4 * whole < inside < 0.6 * whole
        assert after == inside if pinned else after < 0.02 * whole


# -- errors -----------------------------------------------------------------------------------------------------------
def an_error_on_one_rank(stage: int) -> list[str]:
    """What each rank raises, in its own turn and in the other's; training and generation go on as ever."""
    rank, weights, said = dist.get_rank(), list[Any](), list[str]()
    for fails in (False, True):
        engine, plain = start(speaker(), config(stage, zero=ZERO, inference_tp_size=2)), speaker()
        for step in range(2):
            train(engine, step)
            if not fails:
                continue
            engine.module.fails_after = 2 if rank == 1 else -1
            said.append(outcome(lambda engine=engine: engine.generate(prompt(0), max_new_tokens=6)))
            assert not_at_rest(engine) == []
            engine.module.fails_after = -1
            plain.load_state_dict(full_parameters(engine.module))
            with torch.no_grad():
                expected = plain.generate(prompt(rank))
            assert torch.equal(engine.generate(prompt(rank)), expected)
        weights.append(full_parameters(engine.module))
        engine.destroy()
    assert equal(*weights)
    return said


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_an_error_of_one_rank_in_a_forward_is_one_of_all_and_nobody_waits(pool2: RankPool, stage: int) -> None:
    other, own = pool2.run(an_error_on_one_rank, stage, time_limit=30)
    for theirs, ours in zip(other, own, strict=True):
        assert RankFailedError.__name__ in theirs and "rank 1 failed in generate(): ValueError: no more" in theirs
        assert "ValueError" in ours and RankFailedError.__name__ not in ours


def odd_calls() -> list[str]:
    engine = start(speaker(Masked), config(3, zero=ZERO, inference_tp_size=2))
    odd = dist.get_rank() == 1
    said = [
        outcome(lambda: engine.generate(prompt(0), max_new_tokens=3, streamer=(lambda: 0) if odd else None)),
        outcome(lambda: engine.generate(prompt(0), max_new_tokens="3" if odd else 3)),
        outcome(lambda: engine.generate(prompt(0), max_new_tokens=600 if odd else 3)),
    ]
    engine.module.generation_config = Settings(max_new_tokens=2 + odd)
    said.append(outcome(lambda: engine.generate(prompt(0), max_new_tokens=3)))
    del engine.module.generation_config
    train(engine, 0)
    engine.module.head.added = nn.Parameter(torch.zeros(1), requires_grad=False)
    said.append(outcome(lambda: engine.generate(prompt(0), max_new_tokens=3)))
    del engine.module.head.added
    engine.generate(prompt(0), max_new_tokens=3)
    assert not_at_rest(engine) == []
    engine.destroy()
    return said


def test_calls_that_one_rank_gets_wrong_are_an_error_of_all(pool2: RankPool) -> None:
    other, own = pool2.run(odd_calls, time_limit=30)
    for said in (other, own):
        sentences = ("cannot be sent to them", "TypeError", "max_out_tokens is 512", "other generation_configs")
        for text, sentence in zip(said, (*sentences, "other parameters than at deepspeed.initialize"), strict=True):
            assert sentence in text
    assert all(UsageError.__name__ in own[i] and "rank 1 failed" in other[i] for i in (0, 2))


# -- what can be split ------------------------------------------------------------------------------------------------
class Odd(nn.Module):
    """Layers of names that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.alpha, self.beta = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.words, self.fails_after = nn.Linear(WIDTH, VOCABULARY), -1

    generate = Speaker.generate

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(self.beta(torch.tanh(self.alpha(self.table(ids)).cumsum(1))))


class Codes(Speaker):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)


class Positions(GPT2):
    generate, fails_after = Speaker.generate, -1


def refused(kind: type[nn.Module], ways: int, changes: dict[str, Any]) -> tuple[str, bool]:
    """What ``initialize`` says, and whether the module is as it was."""
    module = speaker(kind)
    before = {n: (type(m), len(m._forward_hooks)) for n, m in module.named_modules()}
    said = outcome(lambda: start(module, config(3, inference_tp_size=ways, changes=changes)))
    same = before == {n: (type(m), len(m._forward_hooks)) for n, m in module.named_modules()}
    return said, same and not any(hasattr(p, name) for p in module.parameters() for name in ("_ds_unit", "tp_place"))


@pytest.mark.parametrize(
    ("kind", "ways", "changes", "sentence"),
    [
        (Odd, 2, {}, "inference_tp_size is 2, but no layer of Odd is known"),
        (Speaker, 3, {}, "hybrid_engine.inference_tp_size 3 does not divide the 2 ranks"),
        (Adapted, 2, {}, "blocks.0 has an adapter"),
        (Codes, 2, {}, "codes is torch.int8"),
        (Decoder, 4, {"tensor_parallel": {"autotp_size": 2}}, "set it to 1 or 2"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name_before_anything_changes(
    pool2: RankPool, kind: type[nn.Module], ways: int, changes: dict[str, Any], sentence: str
) -> None:
    for said, same in pool2.run(refused, kind, ways, changes):
        assert sentence in said and same
        assert DeepSpeedConfigError.__name__ in said or NotYetError.__name__ in said


def test_an_adapter_is_found_in_any_layer() -> None:
    assert adapted_layer(Adapted()) == "blocks.0" and adapted_layer(Speaker()) == ""


def with_rules() -> bool:
    rules = [{"patterns": [r"alpha\."], "partition_type": "column"}, {"patterns": [r"beta\."], "partition_type": "row"}]
    block = {"tensor_parallel": {"partition_config": {"layer_specs": rules}}}
    engine = start(speaker(Odd), config(1, inference_tp_size=2, changes=block))
    with CollectiveSpy() as spy, torch.no_grad():
        same = torch.equal(engine.generate(prompt(dist.get_rank())), speaker(Odd).generate(prompt(dist.get_rank())))
    engine.destroy()
    return same and spy.count("all_reduce") > 0


def test_layers_of_other_names_are_split_by_the_rules_of_tensor_parallel(pool2: RankPool) -> None:
    assert pool2.run(with_rules) == [True, True]


def trained_in_parts() -> None:
    """The same number of ranks share layers in training: they generate so, the same on both."""
    settings = config(1, inference_tp_size=2, changes={"tensor_parallel": {"autotp_size": 2}})
    engine = start(speaker(Decoder), settings)
    with torch.no_grad():
        assert torch.equal(engine.generate(prompt(0)), speaker(Decoder).generate(prompt(0)))
    assert engine._in_parts is None
    engine.destroy()


@pytest.mark.exhaustive
def test_ranks_that_share_layers_in_training_generate_as_they_train(pool2: RankPool) -> None:
    pool2.run(trained_in_parts)
