"""The hybrid engine generates what plain torch generates, token for token, and trains as if it had not; ranks may stop
at different lengths, and an error on one rank is an error on all.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, RankFailedError, UsageError
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.tools.verify.grads import full_parameters
from tests.harness.lockstep import equal, live_bytes, not_at_rest
from tests.harness.pool import RankPool
from tests.harness.spy import CollectiveSpy
from tests.harness.training import make_config, outcome, start

pytestmark = pytest.mark.timeout(120)
VOCABULARY, WIDTH, END = 13, 16, 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)).cumsum(1) / 3)


class Speaker(nn.Module):
    """Next tokens from the sum over those before; greedy generation until ``END`` or so many."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.fails_after = -1

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def generate(self, ids: Tensor, max_new_tokens: int = 8, sample: bool = False) -> Tensor:
        for turn in range(max_new_tokens):
            if turn == self.fails_after:
                raise ValueError("no more words")
            logits = self(ids)[:, -1]
            token = torch.multinomial(logits.softmax(-1), 1) if sample else logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], 1)
            if (token == END).all():
                break
        return ids


class Around(nn.Module):
    """A model whose generate is that of a part, as PEFT's are: the forward of the whole never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Speaker(), nn.Linear(1, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids) * self.scale.weight

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner.generate(*args, **kwargs)


def speaker(kind: type[nn.Module] = Speaker) -> Any:
    torch.manual_seed(5)
    return kind()


def config(stage: int, *, zero: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    changes = options.pop("changes", {})
    return make_config(stage, zero=zero or {}, hybrid_engine={"enabled": True, **options}, **changes)


def prompt(rank: int, turn: int = 0) -> Tensor:
    """Of a length of its own on each rank."""
    generator = torch.Generator().manual_seed(10 * rank + turn)
    return torch.randint(1, VOCABULARY, (2, 3 + 2 * rank), generator=generator)


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(1, VOCABULARY, (2, 7), generator=generator)
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def train(engine: Any, step: int) -> None:
    engine.backward(loss_of(engine, step, dist.get_rank()))
    engine.step()


@torch.no_grad()
def take_over(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Tied weights have one name."""
    for name, param in model.named_parameters():
        param.copy_(weights[name])


def trained(stage: int, options: dict[str, Any], generates: bool, kind: type[nn.Module]) -> dict[str, Tensor]:
    """Weights after three steps, with generations between them that are to be plain torch's."""
    rank = dist.get_rank()
    engine = start(speaker(kind), config(stage, **copy.deepcopy(options)))
    assert isinstance(engine, DeepSpeedHybridEngine) and isinstance(engine, deepspeed.DeepSpeedEngine)
    for step in range(3):
        train(engine, step)
        if not generates:
            continue
        plain = speaker(kind)
        take_over(plain.to(next(engine.module.parameters()).dtype), full_parameters(engine.module))
        engine.eval()
        plain.eval()
        for turn in range(2):
            new = 9 if rank == 0 else 2 + turn  # and ranks stop at END, too
            with torch.no_grad():
                expected = plain.generate(prompt(rank, turn), max_new_tokens=new)
            tokens = (engine if turn else engine.module).generate(prompt(rank, turn), max_new_tokens=new)
            assert torch.equal(tokens, expected), f"step {step}: {tokens} for {expected}"
            assert not_at_rest(engine) == [], turn
        if options.get("zero") == ZERO and dist.get_world_size() > 1:
            assert not live_bytes(engine.module), "weights are left whole"
        engine.train()
    weights = full_parameters(engine.module)
    own = type(engine.module).generate
    engine.destroy()
    assert engine.module.generate.__func__ is own, "the module has not its own generate again"
    return weights


def like_plain_torch(stage: int, options: dict[str, Any], kind: type[nn.Module] = Speaker) -> None:
    """Generations are plain torch's, and training goes on bit for bit as without them."""
    silent, weights = (trained(stage, options, generates, kind) for generates in (False, True))
    assert equal(silent, weights)


ZERO: dict[str, Any] = {"param_persistence_threshold": 0}
ON_HOST = {**ZERO, "offload_param": {"device": "cpu"}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "0": (0, {}),
    "2, bf16": (2, {"changes": {"bf16": {"enabled": True}}}),
    "3": (3, {"zero": ZERO}),
    "3, layer by layer": (3, {"zero": ZERO, "pin_parameters": False}),
    "3, small ones whole, layer by layer": (3, {"pin_parameters": False, "changes": {"bf16": {"enabled": True}}}),
    "1": (1, {"release_inference_cache": True}),
    "3, fp16": (3, {"changes": {"fp16": {"enabled": True, "initial_scale_power": 4}}, "tp_gather_partition_size": 2}),
    "3, on the host": (3, {"zero": ON_HOST}),
    "3, on the host, layer by layer": (3, {"zero": ON_HOST, "pin_parameters": False}),
}


@pytest.mark.in_make_test("2, bf16-2", "3, layer by layer-2")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_it_generates_as_plain_torch_and_trains_as_without(
    request: pytest.FixtureRequest, name: str, world: int
) -> None:
    request.getfixturevalue(f"pool{world}").run(like_plain_torch, *CASES[name])


@pytest.mark.in_make_test("False")
@pytest.mark.parametrize("pinned", [True, False])
def test_a_model_that_leaves_generation_to_a_part(pool2: RankPool, pinned: bool) -> None:
    pool2.run(like_plain_torch, 3, {"zero": ZERO, "pin_parameters": pinned}, Around)


def gathers_of(size: int) -> tuple[int, int]:
    """Messages and gathers of one generation."""
    engine = start(speaker(), config(3, zero=ZERO, tp_gather_partition_size=size))
    messages, gathers = engine.runtime.agreement.rounds, engine.runtime.counts.gathers
    engine.generate(prompt(dist.get_rank()))
    result = engine.runtime.agreement.rounds - messages, engine.runtime.counts.gathers - gathers
    engine.destroy()
    return result


def test_so_many_layers_are_gathered_by_one_message(pool2: RankPool) -> None:
    for (one, gathers), (all_, same) in zip(pool2.run(gathers_of, 1), pool2.run(gathers_of, 100), strict=True):
        assert gathers == same and all_ < one


def errors_on_one_rank(stage: int, pinned: bool) -> list[str]:
    """What each rank raises where rank 1 fails in a forward, gives a length that is no number, and gives a word that
    ``generate`` does not know; the training after it is as if nothing had been.
    """
    odd, weights, said = dist.get_rank() == 1, [], list[str]()
    for fails in (False, True):
        engine = start(speaker(), config(stage, zero=ZERO, pin_parameters=pinned))

        def call(engine: Any = engine, **words: Any) -> None:
            said.append(outcome(lambda: engine.generate(prompt(0), **words)))
            assert not_at_rest(engine) == []

        for step in range(2):
            train(engine, step)
            if fails:
                engine.module.fails_after = 2 if odd else -1
                call(max_new_tokens=6)
                engine.module.fails_after = -1
                call(max_new_tokens="3" if odd else 3)
                call(**({"twice": 1} if odd else {}))
                engine.generate(prompt(dist.get_rank()))
        weights.append(full_parameters(engine.module))
        engine.destroy()
    assert equal(*weights)
    return said


@pytest.mark.parametrize(("stage", "pinned"), [(1, True), (3, True), (3, False)])
def test_an_error_of_one_rank_is_one_of_all(pool2: RankPool, stage: int, pinned: bool) -> None:
    other, own = pool2.run(errors_on_one_rank, stage, pinned)
    assert all(RankFailedError.__name__ in said and "rank 1" in said for said in other)
    assert not any(RankFailedError.__name__ in said for said in own)
    assert len(own) == 6 and all("no more words" in said for said in (*other[::3], *own[::3]))
    assert all("ValueError" in said for said in own[::3])
    assert all("TypeError" in said for said in (*own[1::3], *own[2::3]))


class Apart(Speaker):
    """Generates for one prompt at a time, by calling itself."""

    def generate(self, ids: Tensor, max_new_tokens: int = 8, sample: bool = False) -> Tensor:
        if len(ids) == 1:
            tokens = super().generate(ids, max_new_tokens, sample)
            return nn.functional.pad(tokens, (0, ids.shape[1] + max_new_tokens - tokens.shape[1]))
        return torch.cat([self.generate(row, max_new_tokens, sample) for row in ids.split(1)])


def by_itself(pinned: bool) -> None:
    engine = start(speaker(Apart), config(3, zero=ZERO, pin_parameters=pinned))
    ids = prompt(0).repeat(1 + dist.get_rank(), 1)  # other numbers of calls on each rank
    with torch.no_grad():
        expected = speaker(Apart).generate(ids)
    assert torch.equal(engine.generate(ids), expected)
    assert not_at_rest(engine) == []
    engine.destroy()


@pytest.mark.parametrize("pinned", [True, False])
def test_a_generate_that_calls_itself_does_so_on_each_rank_alone(pool2: RankPool, pinned: bool) -> None:
    pool2.run(by_itself, pinned)


def too_long() -> list[str]:
    """One rank's prompt is too long: all raise; the limit counts the prompt and what may follow."""
    engine = start(speaker(), config(3, zero=ZERO, max_out_tokens=10))
    rank = dist.get_rank()
    engine.generate(prompt(0), max_new_tokens=7)
    said = [outcome(lambda: engine.generate(prompt(rank), max_new_tokens=7))]  # 3 + 7 and 5 + 7
    said.append(outcome(lambda: engine.generate(ids=prompt(3))))
    with engine.unsharded() as model:  # each rank for itself
        model.generate(prompt(0), max_new_tokens=rank + 1)
        said.append(outcome(lambda: model.generate(prompt(0), 8)))
    engine.destroy()
    return said


def test_more_than_max_out_tokens_is_refused_on_all_ranks(pool2: RankPool) -> None:
    other, own = pool2.run(too_long)
    assert "rank 1 failed in generate()" in other[0] and "max_out_tokens is 10" in other[0]
    assert UsageError.__name__ in own[0] and "a prompt of 5 tokens and up to 7 new ones are 12" in own[0]
    for said in (other, own):
        assert "9 tokens and up to 8 new ones are 17" in said[1] and "up to 8 new ones are 11" in said[2]


class Fused(nn.Linear):
    """A layer with an adapter, as DeepSpeed-Chat has them."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.right, self.left = nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.randn(width, 4))
        self.weight.requires_grad_(False)
        self.is_fused = False

    def fuse_lora_weight(self) -> None:
        self.weight.data += self.left @ self.right
        self.is_fused = True

    def unfuse_lora_weight(self) -> None:
        self.weight.data -= self.left @ self.right
        self.is_fused = False

    def forward(self, x: Tensor) -> Tensor:
        beside = 0 if self.is_fused else x @ self.right.t() @ self.left.t()
        return super().forward(x) + beside


class Adapted(Speaker):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fused(WIDTH) for _ in range(3))
        self.was_fused: list[bool] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.was_fused.append(all(block.is_fused for block in self.blocks))
        return super().forward(ids)


def adapters(stage: int, mode: str) -> None:
    weights = []
    for generates in (False, True):
        engine = start(speaker(Adapted), config(stage, zero=ZERO))
        train(engine, 0)
        before = full_parameters(engine.module)
        if generates:
            getattr(engine, mode)()
            engine.module.was_fused.clear()
            tokens = engine.generate(prompt(0))
            assert all(engine.module.was_fused) == (mode == "eval")
            assert equal(before, full_parameters(engine.module)), "a bit has changed"
            plain = speaker(Adapted)
            plain.load_state_dict(before)
            for block in plain.blocks if mode == "eval" else ():
                block.fuse_lora_weight()
            with torch.no_grad():
                assert torch.equal(tokens, plain.generate(prompt(0))), "not the tokens of added ones"
            engine.train()
        train(engine, 1)
        weights.append(full_parameters(engine.module))
        engine.destroy()
    assert equal(*weights), "it does not train on alike"


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_are_added_for_a_generation_and_no_bit_changes(pool2: RankPool, stage: int, mode: str) -> None:
    pool2.run(adapters, stage, mode)


class Once(Fused):
    """Adds its adapter once, however often it is asked to."""

    def fuse_lora_weight(self) -> None:
        if not self.is_fused:
            super().fuse_lora_weight()

    def unfuse_lora_weight(self) -> None:
        if self.is_fused:
            super().unfuse_lora_weight()


def fused_by_the_client(fails: bool) -> str:
    """What a generation says of layers that a client has fused; they are still, and compute the same bits."""
    module = speaker()
    module.blocks = nn.ModuleList(Once(WIDTH) for _ in range(3))
    engine = start(module, config(1))
    engine.eval()
    for block in module.blocks[1:]:
        block.fuse_lora_weight()
    before, weights = module(prompt(0)), full_parameters(module)
    module.fails_after = 1 if fails else -1
    said = outcome(lambda: engine.generate(prompt(0)))
    assert [block.is_fused for block in module.blocks] == [False, True, True]
    assert torch.equal(before, module(prompt(0))) and equal(weights, full_parameters(module))
    engine.destroy()
    return said


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_client_has_fused_stays_so_after_a_generation_and_after_its_error(pool2: RankPool, fails: bool) -> None:
    for said in pool2.run(fused_by_the_client, fails):
        assert ("no more words" in said) == fails


def refused(model: str, options: dict[str, Any], zero: dict[str, Any]) -> str:
    module = {"speaker": Speaker, "mute": lambda: nn.Linear(2, 2)}[model]()
    said = outcome(lambda: start(module, config(3, zero=zero, **options)))
    assert not any(hasattr(p, "_ds_unit") for p in module.parameters())
    return said


@pytest.mark.parametrize(
    ("model", "options", "zero", "sentence"),
    [
        ("mute", {}, {}, "Linear has no method generate"),
        ("speaker", {"enable_cuda_graph": True}, {}, "hybrid_engine.enable_cuda_graph true is not in this release yet"),
        ("speaker", {"pin_parameters": False}, {"divergence": "assume_none"}, "leave pin_parameters true"),
    ],
)
def test_what_cannot_generate_is_refused_by_name(
    pool2: RankPool, model: str, options: dict[str, Any], zero: dict[str, Any], sentence: str
) -> None:
    for said in pool2.run(refused, model, options, zero):
        assert sentence in said
        assert UsageError.__name__ in said or DeepSpeedConfigError.__name__ in said


def copies() -> str:
    """A copy of the module generates by itself; what is said of a generation inside a forward."""
    engine = start(speaker(), config(2))
    copied = copy.deepcopy(engine.module)
    assert "generate" in vars(engine.module) and copied.generate.__self__ is copied
    with CollectiveSpy() as spy:
        copied.generate(prompt(0))
    assert spy.count() == 0
    inside = list[str]()
    engine.module.blocks[0].register_forward_hook(
        lambda *_: inside.append(outcome(lambda: engine.generate(prompt(0)))) if not inside else None
    )
    engine(prompt(0))
    engine.destroy()
    return inside[0]


def hooks_of_a_client(stage: int) -> list[list[Any]]:
    """What hooks of a client see in a step: before any generation, after one, and one that was added inside it."""
    engine, seen, steps = start(speaker(), config(stage, zero=ZERO)), list[Any](), list[list[Any]]()
    head = engine.module.head
    head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is None))
    head.register_forward_pre_hook(lambda m, _: seen.append(tuple(m.weight.shape)))
    head.register_forward_hook(lambda m, *_: seen.append(float(m.weight.detach().sum())))
    for turn in range(3):
        loss = loss_of(engine, 0, dist.get_rank())
        engine.backward(loss)
        engine.zero_grad()
        steps.append(seen[:])
        engine.generate(prompt(0))
        if turn == 1:
            with engine.unsharded():
                head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is None))
        seen.clear()
    engine.destroy()
    return steps


@pytest.mark.parametrize("stage", [2, 3])
def test_hooks_of_a_client_see_after_a_generation_what_they_saw_before(pool2: RankPool, stage: int) -> None:
    for first, second, third in pool2.run(hooks_of_a_client, stage):
        assert first == second and third == [*first, first[-1]] and len(first) == 3


def wrapped() -> str:
    """A client has put its own ``generate`` around the engine's, and goes on with the module after the engine."""
    engine, plain = start(speaker(), config(3, zero=ZERO)), speaker()
    module, routed = engine.module, engine.module.generate
    module.generate = lambda *args, **kwargs: routed(*args, **kwargs)
    module.generate(prompt(0))
    engine.destroy()
    said = outcome(lambda: engine.generate(prompt(0)))
    with torch.no_grad():
        assert torch.equal(module.generate(prompt(0)), plain.generate(prompt(0)))
    return said


def test_what_a_client_puts_around_generate_works_after_the_engine(pool2: RankPool) -> None:
    assert all("this engine was destroyed" in said for said in pool2.run(wrapped))


def test_a_copy_of_the_module_is_not_the_engines(pool2: RankPool) -> None:
    assert all("inside a forward or backward" in said for said in pool2.run(copies))
