"""Whole weights out of an engine: streamed in buckets, at the least bytes, and for generation; no rank waits for one
that has left.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.monitor import hostmem
from deepspeed.pipe import PipelineModule
from deepspeed.tools.verify.models import MicroBatch, case_named
from deepspeed.zero.plan import StateKind
from tests.harness import pipes
from tests.harness.decoders import Llama, batch, loss_of
from tests.harness.lockstep import TOLERANCE, Lockstep, live_bytes
from tests.harness.pool import RankPool
from tests.harness.spy import CollectiveSpy
from tests.harness.training import ADAMW, make_config, outcome, start

pytestmark = pytest.mark.timeout(120)
MAX = 4000
ZERO = {"param_persistence_threshold": 20, "reduce_bucket_size": 400}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "0": (0, {}),
    "1": (1, {}),
    "3": (3, {}),
    "3, bf16": (3, {"bf16": {"enabled": True}}),
    "3, parameters on the host": (3, {"zero": ZERO | {"offload_param": {"device": "cpu"}}}),
    "3, groups of two": (3, {"zero": ZERO | {"mics_shard_size": 2}}),
    "1, layers in two parts": (1, {"tensor_parallel": {"autotp_size": 2}}),
    "3, layers in two parts": (3, {"tensor_parallel": {"autotp_size": 2}}),
}


def settings(name: str) -> dict[str, Any]:
    stage, changes = SETTINGS[name]
    changes = dict(changes)
    zero = {"stage": stage, **changes.pop("zero", ZERO)}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "zero_optimization": zero, **changes}


def expected(module: nn.Module, config: dict[str, Any]) -> dict[str, Tensor]:
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    return {name: p.detach().to(dtype).clone() for name, p in module.named_parameters()}


def streamed(name: str, dst: int | None) -> tuple[list[str], int, int]:
    """What is wrong; the bytes that this rank has sent, and those that it lacked."""
    config, model = settings(name), Llama(tied=True, bias=True)
    whole = expected(model, config)
    engine = start(model, config)
    rank, wrong = dist.get_rank(), list[str]()
    wanted = dst is None or rank == dst
    held = sum(
        s.numel if not u.movable else max(0, min(s.stop, hi) - max(s.offset, lo))
        for u in engine.runtime.units
        for lo, hi in [u.range_of(StateKind.PARAM)]
        for s in u.layout.segments
    )
    got: dict[str, Tensor] = {}
    with CollectiveSpy() as spy:
        for bucket in engine.stream_weights(MAX, dst=dst):
            largest = max((values.nbytes for _, values in bucket), default=0)
            if sum(values.nbytes for _, values in bucket) > max(MAX, largest):
                wrong.append("a bucket is too large")
            if bool(bucket) != wanted:
                wrong.append("the wrong ranks have it")
            got |= dict(bucket)
    sent = spy.nbytes("broadcast") if dst is None else spy.nbytes("isend")
    wrong += [n for n, v in got.items() if n not in whole or not torch.equal(v, whole[n]) or v.dtype != whole[n].dtype]
    if wanted and list(got) != list(whole):
        wrong.append(f"names {list(got)}")
    width = 2 if "bf16" in config else 4
    lacking = sum(v.numel() for v in whole.values()) - held
    wrong += [] if all(u.users == u.pins == 0 for u in engine.runtime.units) else ["something is held"]
    engine.backward(loss_of(engine, batch(0, 0)))
    engine.step()
    engine.destroy()
    return wrong, sent, lacking * width


@pytest.mark.in_make_test(
    "0-None", "3-None", "3, parameters on the host-None", "3, groups of two-None", "3, layers in two parts-None"
)
@pytest.mark.parametrize("dst", [None, 1])
@pytest.mark.parametrize("name", SETTINGS)
def test_streamed_weights_are_the_model_s(pool4: RankPool, name: str, dst: int | None) -> None:
    results = pool4.run(streamed, name, dst)
    assert [wrong for wrong, *_ in results] == [[]] * 4


@pytest.mark.parametrize("name", ["1", "3, bf16", "3, layers in two parts"])
def test_every_byte_travels_once_to_who_lacks_it(pool4: RankPool, name: str) -> None:
    padding = 1.05
    results = pool4.run(streamed, name, 1)
    least = results[1][2]
    assert least <= sum(sent for _, sent, _ in results) <= padding * least + 4000 * bool(least)
    results = pool4.run(streamed, name, None)
    for _, passed, _ in results:  # every rank sees every broadcast, which is all of the weights once
        assert passed <= padding * 4 / 3 * max(lacking for *_, lacking in results) + 4000 * bool(least)


def stages_of_a_pipeline(level: int, dst: int | None) -> list[str]:
    specs = pipes.layers(4)
    plain = {name: p.detach().clone() for name, p in pipes.Plain(specs).named_parameters()}
    module = PipelineModule(specs, num_stages=2, loss_fn=pipes.cross_entropy)
    engine = pipes.start(module, pipes.config(level, 2))
    got = dict(pair for bucket in engine.stream_weights(2000, dst=dst) for pair in bucket)
    engine.destroy()
    if dst is not None and dist.get_rank() != dst:
        return [] if not got else ["not for this rank"]
    wrong = [name for name in plain if name not in got or not torch.equal(plain[name], got[name])]
    return wrong + [name for name in got if name not in plain]


@pytest.mark.parametrize("dst", [None, 3])
@pytest.mark.parametrize("level", [0, 1])
def test_stages_of_a_pipeline_are_streamed_as_one_model(pool4: RankPool, level: int, dst: int | None) -> None:
    assert pool4.run(stages_of_a_pipeline, level, dst) == [[]] * 4


def posted(dst: int) -> tuple[bool, list[list[str]], int]:
    """Whether a stream over messages as for nccl gives the same bits, the batches of messages, and broadcasts."""
    module = PipelineModule(pipes.layers(4), num_stages=2, loss_fn=pipes.cross_entropy)
    engine = pipes.start(module, pipes.config(1, 2))
    plain = dict(pair for bucket in engine.stream_weights(2000, dst=dst) for pair in bucket)
    job, batches, batch = engine.mesh.job, list[list[str]](), dist.batch_isend_irecv

    def noted(ops: list[dist.P2POp]) -> list[dist.Work]:
        batches.append([f"{op.op.__name__} {op.group_peer}" for op in ops])
        return batch(ops)

    broadcasts: list[str] = []
    job.ledger.append(lambda op, *_: broadcasts.append(op) if op == "broadcast" else None)
    with pytest.MonkeyPatch.context() as patch:
        object.__setattr__(job, "backend", "nccl")
        patch.setattr(dist, "batch_isend_irecv", noted)
        patch.setattr("deepspeed.comm.point_to_point.send", None)
        patch.setattr("deepspeed.comm.point_to_point.receive", None)
        got = dict(pair for bucket in engine.stream_weights(2000, dst=dst) for pair in bucket)
        object.__setattr__(job, "backend", "gloo")
    job.ledger.pop()
    engine.destroy()
    return got.keys() == plain.keys() and all(torch.equal(got[n], plain[n]) for n in plain), batches, len(broadcasts)


def test_messages_of_a_stream_are_batched_on_nccl_which_makes_a_communicator_for_each_pair_of_single_ones(
    pool4: RankPool,
) -> None:
    """The first call on the communicator that they share is one of all ranks."""
    results = pool4.run(posted, 3)
    assert all(same and broadcasts == 1 for same, _, broadcasts in results)
    sent = [sum(batches, []) for _, batches, _ in results]
    assert all(one == "isend 3" for rank in (0, 1, 2) for one in sent[rank])
    assert sent[3] and all(one.startswith("irecv") for one in sent[3]) and len(sent[3]) == sum(map(len, sent[:3]))


class Own(Exception):
    pass


def abandoned(how: str, who: str) -> tuple[str, float]:
    """What this rank was told, and the error of training that goes on."""
    pair = Lockstep(case_named("plain"), make_config(3, zero={"param_persistence_threshold": 0}))
    pair.step(0)
    engine = pair.engine

    def stream() -> None:
        if who == "all" or dist.get_rank() == 1:
            kept = engine.stream_weights(500)
            if how == "raises":
                with kept as buckets:
                    for number, _ in enumerate(buckets):
                        if number == 1:
                            raise Own("disk full")
            for number, _ in enumerate(kept):
                if number == 1:
                    break
            if how == "goes on training":
                case_named("plain").seeded_loss(engine, MicroBatch(7, 0, 0, 1))
                engine.zero_grad()
            del kept
        else:
            assert len(list(engine.stream_weights(500))) > 3

    said = outcome(stream)
    pair.step(1)
    return said, pair.finish()[0]


@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.parametrize("how", ["raises", "breaks", "goes on training"])
def test_a_stream_that_one_rank_leaves_ends_on_all(pool3: RankPool, how: str, who: str) -> None:
    results = pool3.run(abandoned, how, who, time_limit=40)
    for rank, (said, error) in enumerate(results):
        assert error < TOLERANCE
        if who == "all" or rank == 1:
            assert ("disk full" in said) == (how == "raises") and ("UsageError" not in said)
        else:
            assert "UsageError" in said and "rank 1, bucket 2 of stream_weights" in said
            assert ("disk full" in said) == (how == "raises"), said


WIDTH, LAYERS = 1100, 12  # blocks that glibc gives back


def peak(max_bytes: int, dst: int | None) -> int:
    """By how many bytes the resident set of this process grew at most over a stream."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    engine = start(model, make_config(3, zero={"param_persistence_threshold": 0}))
    gc.collect()
    hostmem.HeapTrimmer().trim()
    dist.barrier()
    assert hostmem.reset_peak_rss()
    before = hostmem.rss_bytes()
    for bucket in engine.stream_weights(max_bytes, dst=dst):
        del bucket
    grown = hostmem.peak_rss_bytes() - before
    engine.destroy()
    return grown


@pytest.mark.parametrize("dst", [None, 0])
def test_a_stream_holds_a_bucket_and_not_the_model(pool2: RankPool, dst: int | None) -> None:
    one = 4 * WIDTH * WIDTH
    for grown in pool2.run(peak, 4 * one, dst):
        assert grown <= 4 * one + (8 << 20), grown
    assert max(pool2.run(peak, 1 << 30, dst)) >= 0.9 * LAYERS * one, "a control: one bucket is the model"


def generated(stage: int) -> dict[str, Any]:
    case = case_named("plain")
    pair = Lockstep(case, make_config(stage, zero={"param_persistence_threshold": 0}))
    pair.step(0)
    engine, rank = pair.engine, dist.get_rank()
    found: dict[str, Any] = {}
    with CollectiveSpy() as spy, engine.unsharded() as module:
        inside = spy.count()
        with torch.no_grad():
            for turn in range(1 + 3 * rank):  # ranks stop at different lengths
                loss = case.seeded_loss(module, MicroBatch(9, turn, 0, 1))[0]
        found["silent"] = spy.count() == inside
        found["whole"] = live_bytes(module) > 0 or stage < 3
        found["backward"] = outcome(lambda: engine.backward(loss))
        found["step"] = outcome(engine.step)
    found["freed"] = live_bytes(engine.module) == 0 or stage < 3

    def edits() -> None:
        with engine.unsharded() as module, torch.no_grad():
            if rank == 1:
                next(module.parameters()).add_(1)

    found["edited"] = outcome(edits) if stage == 3 else ""
    pair.step(1)
    found["error"] = pair.finish()[0]
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_unsharded_weights_generate_without_other_ranks(pool2: RankPool, stage: int) -> None:
    for found in pool2.run(generated, stage):
        assert found["silent"] and found["whole"] and found["freed"] and found["error"] < TOLERANCE
        assert "inside unsharded()" in found["backward"] and "inside unsharded()" in found["step"]
        assert ("read-only" in found["edited"]) == (stage == 3)


def nested() -> tuple[bool, str, str, float]:
    """Whether the inner context leaves the outer one as it was, what it says to training and to destroy()."""
    case, rank = case_named("plain"), dist.get_rank()
    pair = Lockstep(case, make_config(3, zero={"param_persistence_threshold": 0}))
    engine = pair.engine
    with engine.unsharded() as module, torch.no_grad():
        with engine.unsharded():
            pass
        with CollectiveSpy() as spy:
            for turn in range(1 + 3 * rank):
                loss = case.seeded_loss(module, MicroBatch(9, turn, 0, 1))[0]
        silent = spy.count() == 0
        training = outcome(lambda: engine.backward(loss))
        ending = outcome(engine.destroy)
    pair.step(0)
    return silent, training, ending, pair.finish()[0]


def test_a_context_inside_unsharded_leaves_the_outer_one(pool2: RankPool) -> None:
    for silent, training, ending, error in pool2.run(nested):
        assert silent and error < TOLERANCE
        assert "inside unsharded()" in training and "inside unsharded()" in ending


def parts_in_generation() -> float:
    torch.manual_seed(0)
    model = Llama()
    tokens = torch.arange(12).view(2, 6) % 7
    with torch.no_grad():
        whole = model(tokens)
    engine = start(model, settings("3, layers in two parts"))
    with engine.unsharded() as module, torch.no_grad():
        error = float((module(tokens) - whole).abs().max())
    engine.destroy()
    return error


def test_unsharded_layers_in_parts_are_gathered_over_data_ranks_only(pool4: RankPool) -> None:
    assert max(pool4.run(parts_in_generation)) < 1e-5


def too_little_memory() -> str:
    engine = start(case_named("plain").build(), make_config(3, zero={"param_persistence_threshold": 0}))
    accelerator = deepspeed.accelerator.get_accelerator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(accelerator), "available_memory", lambda *_: 10 if dist.get_rank() == 1 else 1 << 40)

        def enter() -> None:
            with engine.unsharded():
                pass

        said = outcome(enter)
    engine.destroy()
    return said


def test_unsharded_is_refused_on_all_ranks_where_one_lacks_memory(pool2: RankPool) -> None:
    for said in pool2.run(too_little_memory):
        assert "UsageError" in said and "unsharded() needs" in said and "stream_weights()" in said


def wrong_calls() -> list[str]:
    engine = start(case_named("plain").build(), make_config(3))
    calls: list[Callable[[], Any]] = [
        lambda: engine.stream_weights("many"),
        lambda: engine.stream_weights(dst=9),
        lambda: engine.stream_weights(merge_adapters=True),
    ]
    said = [outcome(call) for call in calls]
    engine.destroy()
    return said


def test_wrong_calls_get_a_sentence(pool2: RankPool) -> None:
    for size, rank, adapters in pool2.run(wrong_calls):
        assert "max_bytes" in size and "dst 9 is not one of the engine's ranks [0, 1]" in rank
        assert UsageError.__name__ in adapters and "no layer with an adapter" in adapters
