"""zero.Init: a model that never exists whole trains exactly like one that was built plainly (with rank 0's values)."""

import contextlib
import copy
import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import ReleasedParameterError, UsageError
from deepspeed.tools.verify.grads import full_parameters, scaled_error
from deepspeed.tools.verify.models import (
    HIDDEN,
    VOCABULARY,
    Case,
    ResidualBlock,
    case_named,
    cross_entropy,
    token_batch,
)
from deepspeed.zero import ZeroParamStatus
from tests.harness.devices import two_devices
from tests.harness.lockstep import TOLERANCE, Lockstep, equal, live_bytes
from tests.harness.logs import logged
from tests.harness.pool import PatientPool, RankPool
from tests.harness.training import here, make_config, start, train_step

pytestmark = pytest.mark.timeout(60)
ZERO = {"param_persistence_threshold": 0}


class Base(nn.Module):
    """Weights made and initialised by the parent's constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.gain = nn.Parameter(torch.full((HIDDEN,), 2.0))
        nn.init.normal_(self.embed.weight, std=0.3)


class Rich(Base):
    """Everything that constructors do: child weights edited after attachment, apply(init), ties, odd shapes, buffers,
    arange.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ResidualBlock() for _ in range(3)])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        nn.init.xavier_uniform_(self.layers[0].up.weight)
        with torch.no_grad():
            self.layers[1].down.bias.fill_(0.125)
            self.layers[1].up.weight[:2] = 0.5
        self.layers[2].up.weight.data.normal_(mean=0.0, std=0.02)
        self.register_buffer("positions", torch.arange(7))
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)), persistent=False)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, HIDDEN))
        self.counts = nn.Parameter(torch.arange(4), requires_grad=False)
        self.apply(self._init)
        self.head.weight = self.embed.weight

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(0.75)
            nn.init.constant_(module.bias, 0.01)
        elif isinstance(module, nn.Linear) and module.bias is not None and module.out_features == HIDDEN:
            module.bias.data.add_(0.0625)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.gain * self.scalar
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.empty.sum()


class Whole(Base):
    """The output projection is functional and the constructor is one long method of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(HIDDEN, HIDDEN)
        self.b = nn.Sequential(
            nn.Linear(HIDDEN, HIDDEN), nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN))
        )
        self.b[1][1].weight = nn.Parameter(torch.eye(HIDDEN))
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_normal_(p)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.b(self.a(self.embed(tokens) * self.gain)), self.embed.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {"rich": Rich, "whole": Whole, "tied": case_named("tied").build}


def _seeded(name: str) -> nn.Module:
    torch.manual_seed(99 + dist.get_rank())  # ranks draw differently: rank 0's values must win
    return MODELS[name]()


def _from_rank_0(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.numel():
                dist.broadcast(tensor, 0)
    return model


def equals_a_plain_model(name: str, stage: int) -> tuple[float, str]:
    """Names, values and training of the model under Init against the same constructor run plainly."""
    plain = _from_rank_0(_seeded(name))
    with deepspeed.zero.Init(config_dict_or_path=make_config(stage, zero=ZERO)):
        model = _seeded(name)
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for key, param in model.named_parameters(remove_duplicate=False):
        assert (param.shape, param.dtype) == (expected[key].shape, expected[key].dtype), key
    assert list(model.state_dict()) == list(plain.state_dict())
    for key, value in full_parameters(model).items():
        assert torch.equal(value, expected[key]), f"{key}: {value} for {expected[key]}"
    assert not live_bytes(model), "parameters are whole after construction"
    assert equal(dict(model.named_buffers()), dict(plain.named_buffers()))
    case = Case(name, lambda: model, token_batch, cross_entropy)
    pair = Lockstep(case, make_config(stage, zero=ZERO), model=model, plain=plain)
    for step in range(2):
        pair.step(step)
    return pair.finish()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_built_sharded_equals_one_built_plainly(pool2: RankPool, name: str, stage: int) -> None:
    for error, worst in pool2.run(equals_a_plain_model, name, stage):
        assert error <= TOLERANCE, worst


def test_on_three_ranks(pool3: RankPool) -> None:
    for error, worst in pool3.run(equals_a_plain_model, "rich", 3):
        assert error <= TOLERANCE, worst


def sixteen_bits(block: str, explicit: bool) -> None:
    config = make_config(3, zero=ZERO, **{block: {"enabled": True}})
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[block]
    plain = _from_rank_0(_seeded("rich"))
    with deepspeed.zero.Init(dtype=dtype) if explicit else deepspeed.zero.Init(config_dict_or_path=config):
        made = (torch.zeros(1), torch.arange(3), torch.arange(3.0), torch.ones(2, dtype=torch.float64))
        model = _seeded("rich")
    # What becomes a buffer keeps its dtype; what becomes a parameter is rounded when it is cut.
    assert [t.dtype for t in made] == [torch.float32, torch.int64, torch.float32, torch.float64]
    assert model.counts.dtype is model.positions.dtype is torch.int64, "integers lost their dtype"
    assert all(p.dtype is dtype for key, p in model.named_parameters() if key != "counts")
    expected = dict(plain.named_parameters())
    deterministic = ("gain", "scalar", "layers.0.norm.weight", "layers.1.norm.bias", "counts")
    found = full_parameters(model)
    assert not [key for key in deterministic if not torch.equal(found[key], expected[key].to(found[key].dtype))]
    engine = start(model, config)
    train_step(engine, case_named("tied"), 0)
    assert all(bool(value.isfinite().all()) for value in full_parameters(model).values())
    engine.destroy()


@pytest.mark.parametrize("explicit", [False, True], ids=["from_config", "dtype"])
@pytest.mark.parametrize("block", ["bf16", "fp16"])
def test_sixteen_bit_construction(pool2: RankPool, block: str, explicit: bool) -> None:
    pool2.run(sixteen_bits, block, explicit)


class Wide(nn.Module):
    """Twelve equal layers, each a twelfth of the model."""

    WIDTH, DEPTH = 64, 12

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(self.WIDTH, self.WIDTH), nn.ReLU()) for _ in range(self.DEPTH)]
        )
        self.apply(self._init)
        self.head = nn.Linear(self.WIDTH, 1)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@contextlib.contextmanager
def peak_of_live_parameters(peak: list[int]) -> Iterator[None]:
    """Record the largest number of storage bytes alive at any module's attachment or weight initialisation."""
    gc.collect()
    gc.freeze()  # so that only tensors that are made from here on are looked at

    def look(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            peak.append(_storage_bytes())
            return result

        return wrapper

    with (
        mock.patch.object(nn.init, "normal_", look(nn.init.normal_)),
        mock.patch.object(nn.Module, "add_module", look(nn.Module.add_module)),
    ):
        yield


def _storage_bytes() -> int:
    """Of all tensors since the collector was told to leave the others alone."""
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and not t.is_meta]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def memory_of_construction(meta: bool) -> tuple[int, int, int, int]:
    """(peak while constructing, bytes at rest, this rank's share, the whole) in bytes."""
    peak: list[int] = []
    with (
        mock.patch.object(deepspeed.zero.Init, "kept_numel", 0),
        peak_of_live_parameters(peak),
        deepspeed.zero.Init(),
        torch.device("meta") if meta else contextlib.nullcontext(),
    ):
        model = Wide()
    gc.collect()
    shards = sum(p._ds_unit.shard.untyped_storage().nbytes() for p in model.parameters())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(peak), live_bytes(model), shards, whole


@pytest.mark.in_make_test("meta")
@pytest.mark.parametrize("meta", [False, True], ids=["device", "meta"])
def test_the_model_is_never_whole(pool2: RankPool, meta: bool) -> None:
    for peak, rest, shards, whole in pool2.run(memory_of_construction, meta):
        assert rest == 0
        assert shards <= 0.52 * whole + 128 * 2 * Wide.DEPTH
        one = 4 * Wide.WIDTH * (Wide.WIDTH + 1)
        assert peak <= shards + 5 * one, (
            f"peak {peak} of {whole} bytes, where the shards are {shards} and one layer is {one}"
        )


def built_on_meta() -> float:
    """Meta modules get memory and their own reset_parameters(), and weights loaded into them train."""
    plain = _from_rank_0(case_named("plain").build())
    with deepspeed.zero.Init(), torch.device("meta"):
        model = case_named("plain").build()
    assert all(p.device.type == "cpu" and not p.is_meta for p in model.parameters())
    assert all(bool(v.isfinite().all()) for v in full_parameters(model).values())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            model.load_state_dict(plain.state_dict())
    pair = Lockstep(case_named("plain"), make_config(3, zero=ZERO), model=model, plain=plain)
    pair.step(0)
    return pair.finish()[0]


def never_written(written: tuple[str, ...]) -> tuple[list[str], bool]:
    """Init functions are off around the constructor, as Transformers has them; then some parameters are written."""

    def off(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    with mock.patch.multiple(nn.init, uniform_=off, kaiming_uniform_=off), deepspeed.zero.Init():
        model = nn.Sequential(OrderedDict(first=nn.Linear(8, 8), second=nn.Linear(8, 8)))
    for name, param in model.named_parameters():
        if name.startswith(written):
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                nn.init.normal_(param)
    with logged(logging.WARNING) as said:
        engine = start(model, make_config(3, zero=ZERO))
    finite = bool(engine(torch.ones(1, 8)).isfinite().all())
    engine.destroy()
    return [text for text in said if "never initialised" in text], finite


def test_values_that_nobody_wrote_are_named_and_pass_for_no_weights(pool2: RankPool) -> None:
    (said, finite), (elsewhere, _) = pool2.run(never_written, ("first", "second.bias"))
    assert len(said) == 1 and "NaN: 1 parameter (second.weight)" in said[0] and not finite and not elsewhere
    assert pool2.run(never_written, ("first", "second")) == [([], True), ([], True)]


def test_meta_device_construction(pool2: RankPool) -> None:
    assert max(pool2.run(built_on_meta)) <= TOLERANCE


def devices_after_init() -> tuple[bool, bool]:
    """Nothing has used a torch.device context before (a fresh process): zero.Init must not spoil them for later."""
    with deepspeed.zero.Init(), torch.device("meta"):
        nn.Sequential(nn.Linear(2, 2))
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    return model.weight.is_meta, torch.empty(1).is_meta


def test_device_contexts_work_after_the_first_init() -> None:
    with PatientPool(1) as fresh:
        assert fresh.run(devices_after_init) == [(True, False)]


def odd_uses() -> dict[str, bool]:
    def sharded(module: nn.Module) -> list[bool]:
        return [hasattr(p, "ds_id") for p in module.parameters()]

    names = ("empty", "zeros", "ones", "full", "arange", "eye", "tensor", "rand", "randn")
    before = [getattr(torch, name) for name in names]
    restored = lambda: before == [getattr(torch, name) for name in names]  # noqa: E731
    found: dict[str, bool] = {}
    with deepspeed.zero.Init(enabled=False, config_dict_or_path={"no": "such key"}):
        plain = nn.Linear(4, 4)
        found["disabled does nothing"] = not any(sharded(plain)) and restored()
    with deepspeed.zero.Init():
        with deepspeed.zero.Init(dtype=torch.bfloat16):
            inner = nn.Sequential(nn.Linear(4, 4))
        outer = nn.Sequential(nn.Linear(4, 4))
    found["nested keeps the outer"] = all(sharded(inner) + sharded(outer)) and inner[0].weight.dtype is torch.float32
    found["nested restores"] = restored()
    after = nn.Sequential(nn.Linear(4, 4))
    found["outside is plain"] = not any(sharded(after))
    with contextlib.suppress(KeyError), deepspeed.zero.Init(dtype=torch.bfloat16):
        nn.Linear(4, 4)
        raise KeyError("in a constructor")
    found["error restores"] = restored() and not any(sharded(nn.Sequential(nn.Linear(2, 2))))
    with deepspeed.zero.Init():
        found["usable after an error"] = all(sharded(nn.Sequential(nn.Linear(4, 4))))
    deepspeed.zero.Init(module=after)
    found["module="] = all(sharded(after)) and live_bytes(after) == 0
    with deepspeed.zero.Init(remote_device="cpu", pin_memory=True):
        remote = nn.Sequential(nn.Linear(4, 4))
    found["remote"] = all(sharded(remote)) and remote[0].weight._ds_unit.shard.device.type == "cpu"
    with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}):
        auto = nn.Sequential(nn.Linear(4, 4))
    found["auto in the config"] = auto[0].weight.dtype is torch.float32
    with deepspeed.zero.Init():
        lone = nn.Linear(4, 4)
    found["a lone module is cut at exit"] = all(sharded(lone))
    found["ds attributes"] = (
        tuple(lone.weight.ds_shape) == (4, 4) and lone.weight.ds_numel == 16 and lone.weight.partition_numel() == 8
    )
    return found


def test_odd_uses_of_the_context(pool2: RankPool) -> None:
    for found in pool2.run(odd_uses):
        assert all(found.values()), [name for name, good in found.items() if not good]


def edited() -> tuple[float, bool]:
    """GatheredParameters edits before initialize: the modifier's values win everywhere, an edit without one is refused
    (those after it: test_gathered_parameters.py).
    """
    plain = _from_rank_0(_seeded("tied"))
    with deepspeed.zero.Init():
        model = _seeded("tied")
    target = model.layers[0].up.weight
    with deepspeed.zero.GatheredParameters([target, model.embed.weight], modifier_rank=1), torch.no_grad():
        target.fill_(dist.get_rank() + 0.5)
        if dist.get_rank() == 1:
            nn.init.constant_(model.embed.weight, 0.25)
    with torch.no_grad():
        plain.layers[0].up.weight.fill_(1.5)
        plain.embed.weight.fill_(0.25)
    with pytest.raises(UsageError, match="modifier_rank"):  # noqa: SIM117 - the error comes from the exit
        with deepspeed.zero.GatheredParameters(model.layers[1].up.weight), torch.no_grad():
            model.layers[1].up.weight.fill_(77.0)
    before = max(scaled_error(v, dict(plain.named_parameters())[k].detach()) for k, v in full_parameters(model).items())
    engine = start(model, make_config(3, zero=ZERO))
    losses = [case_named("tied").seeded_loss(m, here(0))[0].detach() for m in (engine, plain)]
    engine.destroy()
    return before, scaled_error(losses[0], losses[1]) <= TOLERANCE


def test_edits_through_gathered_parameters(pool2: RankPool) -> None:
    for error, same_loss in pool2.run(edited):
        assert error == 0.0
        assert same_loss


def resized(under_init: bool) -> tuple[list[int], float]:
    """Replace the embedding by a larger one before initialize, as vocabulary resizing does."""
    plain = _from_rank_0(_seeded("tied"))
    with deepspeed.zero.Init():
        model = _seeded("tied")
    extra = 3
    with deepspeed.zero.Init() if under_init else contextlib.nullcontext():
        bigger = nn.Embedding(VOCABULARY + extra, HIDDEN)
    old = model.embed
    with deepspeed.zero.GatheredParameters([old.weight, bigger.weight], modifier_rank=0), torch.no_grad():
        bigger.weight.zero_()
        bigger.weight[:VOCABULARY] = old.weight
    old.weight = bigger.weight
    old.num_embeddings = VOCABULARY + extra
    model.head.weight = old.weight
    with torch.no_grad():
        wide = torch.cat([plain.embed.weight, torch.zeros(extra, HIDDEN)])
    plain.embed.weight = nn.Parameter(wide)
    plain.head.weight = plain.embed.weight
    pair = Lockstep(case_named("tied"), make_config(3, zero=ZERO), model=model, plain=plain)
    pair.step(0)
    shape = list(model.head.weight.shape)
    return shape, pair.finish()[0]


@pytest.mark.parametrize("under_init", [True, False])
def test_resizing_an_embedding_before_initialize(pool2: RankPool, under_init: bool) -> None:
    for shape, error in pool2.run(resized, under_init):
        assert shape == [VOCABULARY + 3, HIDDEN]
        assert error <= TOLERANCE


def born_twice() -> None:
    """destroy() on a model that was born sharded, then a second engine on it goes on from where the first stopped."""
    with deepspeed.zero.Init():
        model = _seeded("tied")
    for stage in (3, 2):
        engine = start(model, make_config(stage, zero=ZERO))
        train_step(engine, case_named("tied"), 0)
        now = full_parameters(model)
        engine.destroy()
        assert equal(now, full_parameters(model))


def test_a_born_sharded_model_survives_its_engine(pool2: RankPool) -> None:
    pool2.run(born_twice)


def _where_parameters_are_made() -> tuple[str, list[int]]:
    with two_devices(backend="gloo") as devices:  # so that no group is started on devices that are not there
        made = deepspeed.zero.Init().device
        return str(made), devices.chosen


def test_every_rank_builds_its_model_on_its_own_device(pool2: RankPool) -> None:
    assert pool2.run(_where_parameters_are_made) == [("cuda:0", [0]), ("cuda:1", [1])]


def _copy_of_a_part() -> None:
    """PEFT's ``modules_to_save`` copies a part of the model before there is an engine, and trains the copy."""
    config = make_config(3, zero=ZERO)
    torch.manual_seed(3)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        expected = [p.detach().clone() for p in model[1].parameters()]
    copied = copy.deepcopy(model[1])
    cut, alike = ([p._ds_unit.shard.numel() for p in part.parameters()] for part in (model[1], copied))
    assert cut == alike, "the copy is cut otherwise"
    with deepspeed.zero.GatheredParameters(list(copied.parameters())):
        assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), expected, strict=True))
    assert all(p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in model.parameters()), "the source is not let go"
    model[1].requires_grad_(False)
    whole = nn.ModuleList([model, copied])
    whole.forward = lambda x: copied(model[0](x))
    engine = start(whole, config)
    loss = engine(torch.ones(2, 4)).square().mean()
    engine.backward(loss)
    engine.step()
    with deepspeed.zero.GatheredParameters(list(whole.parameters())):
        assert not any(torch.equal(a, b) for a, b in zip(copied.parameters(), expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(model[1].parameters(), expected, strict=True))
    with pytest.raises(ReleasedParameterError):
        copy.deepcopy(copied)  # a part of a living engine is not copied in silence
    engine.destroy()


def _copy_of_all(half: bool) -> None:  # noqa: FBT001
    """A reference model, as trainers copy it, and the model itself, each with its engine; and a copy of a copy."""
    config = make_config(3, zero=ZERO, **({"bf16": {"enabled": True}} if half else {}))
    torch.manual_seed(4)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        model[2].weight.requires_grad_(False)
    model.register_parameter("tied", model[0].weight)
    other = copy.deepcopy(copy.deepcopy(model))
    assert other.tied is other[0].weight and other[0].weight is not model[0].weight
    assert not other[2].weight.requires_grad
    assert all(p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in [*model.parameters(), *other.parameters()])
    frozen = start(other.requires_grad_(False), {k: v for k, v in config.items() if k != "optimizer"})
    engine = start(model, config)
    x = torch.ones(2, 4, dtype=next(model.parameters()).dtype)
    assert torch.equal(engine(x), frozen(x))
    engine.backward(engine(x).float().square().mean())
    engine.step()
    assert not torch.equal(engine(x), frozen(x))
    engine.destroy()
    frozen.destroy()


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_copy_of_a_model_in_shards_is_in_shards(pool2: RankPool, half: bool) -> None:
    pool2.run(_copy_of_all, half)


def test_a_part_of_a_model_in_shards_is_copied_with_its_values_before_there_is_an_engine(pool2: RankPool) -> None:
    pool2.run(_copy_of_a_part)
