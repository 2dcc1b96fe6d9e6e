"""Whole weights out of an engine: streamed in buckets, at the least bytes, and for generation; no rank waits for one
that has left.
"""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.engine import weights
from deepspeed.monitor import hostmem
from deepspeed.pipe import PipelineModule
from deepspeed.reallocate.flow import WeightFlow
from deepspeed.tools.verify.models import MicroBatch, case_named
from deepspeed.zero.plan import StateKind
from tests.harness import pipes
from tests.harness.decoders import Llama, batch, loss_of
from tests.harness.lockstep import TOLERANCE, Lockstep, equal, live_bytes
from tests.harness.pool import RankPool
from tests.harness.spy import CollectiveSpy
from tests.harness.training import ADAMW, make_config, outcome, start

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


def streamed(name: str) -> tuple[list[str], dict[str, int]]:
    """Stream to one rank, and to all; what is wrong, and bytes: sent to the one, passed to all, and lacking here."""
    config, model = settings(name), Llama(tied=True, bias=True)
    whole = expected(model, config)
    engine = start(model, config)
    wrong = list[str]()
    held = sum(
        s.numel if not u.movable else max(0, min(s.stop, hi) - max(s.offset, lo))
        for u in engine.runtime.units
        for lo, hi in [u.range_of(StateKind.PARAM)]
        for s in u.layout.segments
    )
    nbytes = {"lacking": (sum(v.numel() for v in whole.values()) - held) * (2 if "bf16" in config else 4)}
    for dst in (1, None):
        wanted, got = dst is None or dist.get_rank() == dst, dict[str, Tensor]()
        with CollectiveSpy() as spy:
            for bucket in engine.stream_weights(MAX, dst=dst):
                sizes = [values.nbytes for _, values in bucket]
                if sum(sizes) > max(MAX, *sizes, 0):
                    wrong.append("a bucket is too large")
                if bool(bucket) != wanted:
                    wrong.append("the wrong ranks have it")
                got |= dict(bucket)
        nbytes |= {"passed": spy.nbytes("broadcast")} if dst is None else {"sent": spy.nbytes("isend")}
        wrong += [n for n, v in got.items() if not torch.equal(v, whole[n]) or v.dtype != whole[n].dtype]
        if wanted and list(got) != list(whole):
            wrong.append(f"names {list(got)}")
        wrong += [] if all(u.users == u.pins == 0 for u in engine.runtime.units) else ["something is held"]
    engine.backward(loss_of(engine, batch(0, 0)))
    engine.step()
    engine.destroy()
    return wrong, nbytes


@pytest.mark.in_make_test("1", "3, bf16", "3, parameters on the host", "3, groups of two", "3, layers in two parts")
@pytest.mark.parametrize("name", SETTINGS)
def test_streamed_weights_are_the_model_s_and_every_byte_travels_once_to_who_lacks_it(
    pool4: RankPool, name: str
) -> None:
    results = pool4.run(streamed, name)
    assert [wrong for wrong, _ in results] == [[]] * 4
    if name in ("1", "3, bf16", "3, layers in two parts"):
        padding, least = 1.05, results[1][1]["lacking"]
        assert least <= sum(nbytes["sent"] for _, nbytes in results) <= padding * least + 4000 * bool(least)
        most = max(nbytes["lacking"] for _, nbytes in results)
        for _, nbytes in results:  # every rank sees every broadcast, which is all of the weights once
            assert nbytes["passed"] <= padding * 4 / 3 * most + 4000 * bool(least)


def stages_of_a_pipeline(level: int) -> list[str]:
    specs, wrong = pipes.layers(4), list[str]()
    plain = {name: p.detach().clone() for name, p in pipes.Plain(specs).named_parameters()}
    module = PipelineModule(specs, num_stages=2, loss_fn=pipes.cross_entropy)
    engine = pipes.start(module, pipes.config(level, 2))
    for dst in (None, 3):
        got = dict(pair for bucket in engine.stream_weights(2000, dst=dst) for pair in bucket)
        if not equal(got, plain if dst in (None, dist.get_rank()) else {}):
            wrong.append(f"for {dst}: {list(got)}")
    engine.destroy()
    return wrong


@pytest.mark.parametrize("level", [0, 1])
def test_stages_of_a_pipeline_are_streamed_as_one_model(pool4: RankPool, level: int) -> None:
    assert pool4.run(stages_of_a_pipeline, level) == [[]] * 4


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
    return equal(got, plain), batches, len(broadcasts)


def test_messages_of_a_stream_are_batched_on_nccl_which_makes_a_communicator_for_each_pair_of_single_ones(
    pool4: RankPool,
) -> None:
    """The first call on the communicator that they share is one of all ranks."""
    results = pool4.run(posted, 3)
    assert all(same and broadcasts == 1 for same, _, broadcasts in results)
    sent = [sum(batches, []) for _, batches, _ in results]
    assert all(one == "isend 3" for rank in (0, 1, 2) for one in sent[rank])
    assert sent[3] and all(one.startswith("irecv") for one in sent[3]) and len(sent[3]) == sum(map(len, sent[:3]))


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
                            raise OSError("disk full")
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


WIDTH, LAYERS = 1100, 8  # blocks that glibc gives back


def peaks(streams: list[tuple[int, int | None]]) -> list[int]:
    """By how many bytes the resident set of this process grew at most over each stream."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    engine, grown = start(model, make_config(3, zero={"param_persistence_threshold": 0})), []
    for max_bytes, dst in streams:
        gc.collect()
        hostmem.HeapTrimmer().trim()
        dist.barrier()
        assert hostmem.reset_peak_rss()
        before = hostmem.rss_bytes()
        for bucket in engine.stream_weights(max_bytes, dst=dst):
            del bucket
        grown.append(hostmem.peak_rss_bytes() - before)
    engine.destroy()
    return grown


def test_a_stream_holds_a_bucket_and_not_the_model(pool2: RankPool) -> None:
    one = 4 * WIDTH * WIDTH
    to_all, to_one, at_once = zip(*pool2.run(peaks, [(4 * one, None), (4 * one, 0), (1 << 30, None)]), strict=True)
    assert max(*to_all, *to_one) <= 4 * one + (8 << 20), (to_all, to_one)
    assert max(at_once) >= 0.9 * LAYERS * one, "a control: one bucket is the model"


def most_alive(folder: str) -> int:
    """The most bytes of weights that are alive while a folder of 16 matrices and a wider buffer is written."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    model.register_buffer("count", torch.zeros(4, dtype=torch.int64))
    engine = start(model, make_config(1, bf16={"enabled": True}))
    alive, most, following = weakref.WeakSet[Tensor](), 0, WeightFlow.__next__

    def watched(flow: WeightFlow) -> Any:
        nonlocal most
        bucket = following(flow)
        alive.update(values for _, values in bucket)
        most = max(most, sum(values.nbytes for values in alive))
        return bucket

    with patch.object(WeightFlow, "__next__", watched), patch.object(weights, "_BUCKET", "20KB"):
        engine.save_pretrained(folder)
    engine.destroy()
    return most


def test_a_folder_of_several_dtypes_is_written_bucket_by_bucket(pool1: RankPool, tmp_path: Path) -> None:
    (most,) = pool1.run(most_alive, str(tmp_path))
    assert 64 * 64 * 2 <= most <= 20_000


def generated(stage: int) -> dict[str, Any]:
    """Generate between two steps, in a context that has had another inside."""
    case = case_named("plain")
    pair = Lockstep(case, make_config(stage, zero={"param_persistence_threshold": 0}))
    pair.step(0)
    engine, rank = pair.engine, dist.get_rank()
    found: dict[str, Any] = {}
    with engine.unsharded() as module:
        with engine.unsharded():
            pass
        with CollectiveSpy() as spy, torch.no_grad():
            for turn in range(1 + 3 * rank):  # ranks stop at different lengths
                loss = case.seeded_loss(module, MicroBatch(9, turn, 0, 1))[0]
        found["silent"] = spy.count() == 0
        found["whole"] = live_bytes(module) > 0 or stage < 3
        found["told"] = [outcome(lambda: engine.backward(loss)), outcome(engine.step), outcome(engine.destroy)]
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
        assert all("inside unsharded()" in text for text in found["told"])
        assert ("read-only" in found["edited"]) == (stage == 3)


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


def refused_calls() -> list[str]:
    engine = start(case_named("plain").build(), make_config(3, zero={"param_persistence_threshold": 0}))

    def unsharded() -> None:
        with engine.unsharded():
            pass

    calls: list[Callable[[], Any]] = [
        lambda: engine.stream_weights("many"),
        lambda: engine.stream_weights(dst=9),
        lambda: engine.stream_weights(merge_adapters=True),
        unsharded,
    ]
    with pytest.MonkeyPatch.context() as patch:  # rank 1 lacks memory
        accelerator = type(deepspeed.accelerator.get_accelerator())
        patch.setattr(accelerator, "available_memory", lambda *_: 10 if dist.get_rank() == 1 else 1 << 40)
        said = [outcome(call) for call in calls]
    engine.destroy()
    return said


def test_refused_calls_get_a_sentence_on_all_ranks(pool2: RankPool) -> None:
    for size, rank, adapters, memory in pool2.run(refused_calls):
        assert "max_bytes" in size and "dst 9 is not one of the engine's ranks [0, 1]" in rank
        assert "UsageError" in adapters and "no layer with an adapter" in adapters
        assert "UsageError" in memory and "unsharded() needs" in memory and "stream_weights()" in memory
