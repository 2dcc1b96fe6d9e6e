"""Pipeline stages, tensor-parallel ranks and data-parallel ranks together, under ZeRO: the numbers of one process, and
checkpoints that move between layouts.
"""

import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import deepspeed
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.harness import decoders
from tests.harness.pool import RankPool
from tests.harness.training import ADAMW

pytestmark = pytest.mark.timeout(240)
MICROS, CLIP = 4, 0.5


def layers() -> list[nn.Module]:
    """A decoder as a list."""
    model = decoders.Llama(bias=True, head_norms=True)
    return [model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head]


def loss_fn(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of the next word."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def start(
    stage: int, pp: int, tp: int, *, micros: int, schedule: str = "1f1b", chunks: int = 1
) -> deepspeed.PipelineEngine:
    """An engine whose ranks are cut pp x data x tp."""
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": micros, "gradient_clipping": CLIP,
        "optimizer": ADAMW, "zero_optimization": {"stage": stage, "param_persistence_threshold": 20},
        "tensor_parallel": {"autotp_size": tp}, "pipeline": {"schedule": schedule, "chunks_per_stage": chunks},
    }  # fmt: skip
    model = PipelineModule(layers(), num_stages=pp, loss_fn=loss_fn, partition_method="uniform")
    return deepspeed.initialize(model=model, config=config)[0]


def largest_error(stage: int, schedule: str, chunks: int) -> float:
    """Of loss, norm and weights in three steps on (two stages x data ranks x two parts), beside one process."""
    plain = nn.Sequential(*layers())
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW["params"])
    engine = start(stage, 2, 2, micros=MICROS, schedule=schedule, chunks=chunks)
    ways, worst = engine.mesh.data.size, 0.0
    theirs = dict(plain.named_parameters())
    for step in range(3):
        batches = [decoders.batch(step * MICROS + micro, way) for way in range(ways) for micro in range(MICROS)]
        loss = sum(loss_fn(plain(ids), ids) for ids in batches) / len(batches)
        optimizer.zero_grad()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), CLIP))
        optimizer.step()
        mine = [decoders.batch(step * MICROS + micro, engine.mesh.data.index) for micro in range(MICROS)]
        error = abs(float(engine.train_batch(iter([(ids, ids) for ids in mine]))) - float(loss))
        worst = max(worst, error, abs(engine.get_global_grad_norm() - norm) / norm)
        for parameter in engine.module.parameters():
            whole = safe_get_full_fp32_param(parameter)
            alike = [other for other in theirs.values() if other.shape == whole.shape]
            worst = max(worst, min(float((whole - other).abs().max()) for other in alike))
    engine.destroy()
    return worst


@pytest.mark.parametrize("case", [(1, "1f1b", 1), (3, "zero_bubble", 1), (0, "gpipe", 1), (2, "interleaved", 2)])
def test_stages_of_parts_train_as_one_process(pool4: RankPool, case: tuple[int, str, int]) -> None:
    assert max(pool4.run(largest_error, *case)) < 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ways_along_each_axis_train_as_one_process(stage: int, schedule: str) -> None:
    with RankPool(8) as pool:
        assert max(pool.run(largest_error, stage, schedule, 2 if schedule == "interleaved" else 1)) < 1e-6


def one_step(engine: deepspeed.PipelineEngine, step: int) -> float:
    """Its loss."""
    batches = [decoders.batch(step * 2 + micro, 0) for micro in range(2)]
    return float(engine.train_batch(iter([(ids, ids) for ids in batches])))


def state_of(engine: deepspeed.PipelineEngine) -> dict[str, str]:
    """A hash of each weight with its moment, of all stages."""
    mine = {}
    for name, parameter in engine.module.named_parameters():
        values = safe_get_full_fp32_param(parameter), safe_get_full_optimizer_state(parameter, "exp_avg")
        mine[name] = hashlib.sha256(b"".join(v.contiguous().numpy().tobytes() for v in values)).hexdigest()
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: digest for each in everyone for name, digest in each.items()}


def save(stage: int, pp: int, tp: int, folder: str) -> tuple[dict[str, str], float]:
    """The state after two steps, and the next loss."""
    engine = start(stage, pp, tp, micros=2)
    for step in range(2):
        one_step(engine, step)
    engine.save_checkpoint(folder, "t")
    result = state_of(engine), one_step(engine, 5)
    engine.destroy()
    return result


def load(stage: int, pp: int, tp: int, folder: str) -> tuple[dict[str, str], float]:
    """The same of an engine that goes on from there."""
    engine = start(stage, pp, tp, micros=2)
    engine.load_checkpoint(folder)
    result = state_of(engine), one_step(engine, 5)
    engine.destroy()
    return result


LAYOUTS = {"one rank": (1, 0, 1, 1), "parts": (2, 3, 1, 2), "stages of parts": (4, 2, 2, 2)}
LAYOUTS |= {"four parts": (4, 3, 1, 4), "stages of data ranks": (4, 3, 2, 1)}


@pytest.mark.parametrize(
    ("before", "after"),
    [("stages of parts", name) for name in LAYOUTS if name != "stages of parts"] + [("one rank", "stages of parts")],
)
def test_a_run_goes_on_at_any_other_layout(
    pool1: RankPool, pool2: RankPool, pool4: RankPool, tmp_path: Path, before: str, after: str
) -> None:
    pools = {1: pool1, 2: pool2, 4: pool4}
    (ranks, *cut), (others, *theirs) = LAYOUTS[before], LAYOUTS[after]
    state, loss = pools[ranks].run(save, *cut, str(tmp_path))[0]
    for found, again in pools[others].run(load, *theirs, str(tmp_path)):
        assert found == state
        assert abs(again - loss) < 1e-6
