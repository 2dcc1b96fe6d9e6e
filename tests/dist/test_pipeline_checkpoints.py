"""A run saved at one number of pipeline stages goes on at any other, and without a pipeline: tensors are named by the
place of their layer in the whole model.
"""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from deepspeed.checkpoint.load.reader import find_and_open
from deepspeed.pipe import PipelineModule
from deepspeed.tools.verify.grads import full_parameters
from tests.harness import pipes
from tests.harness.lockstep import equal
from tests.harness.pool import RankPool
from tests.harness.training import outcome

MICROS = 4  # of the whole job
LAYOUTS = {
    "2 stages 1f1b": (2, 2, {"schedule": "1f1b"}, 1),
    "2 stages interleaved": (2, 2, {"schedule": "interleaved", "chunks_per_stage": 2}, 3),
    "no pipeline": (2, 1, {}, 3),
    "one rank": (1, 1, {}, 0),
    "4 stages": (4, 4, {"schedule": "zero_bubble"}, 2),
    "2 stages x 2": (4, 2, {"schedule": "zbv"}, 3),
}


def _start(stages: int, pipeline: dict[str, Any], level: int) -> Any:
    data = dist.get_world_size() // stages
    module = PipelineModule(pipes.layers(6), num_stages=stages, loss_fn=pipes.cross_entropy)
    return pipes.start(module, pipes.config(level, MICROS // data, pipeline=pipeline))


def _batch(engine: Any, step: int) -> Any:
    data, ways = engine.mesh.data.index, engine.mesh.data.size
    return iter(
        [pipes.micro_batch(step, micro, 0) for micro in range(data * MICROS // ways, (data + 1) * MICROS // ways)]
    )


def _save(folder: str, layout: str) -> None:
    _, stages, pipeline, level = LAYOUTS[layout]
    engine = _start(stages, pipeline, level)
    engine.train_batch(_batch(engine, 0))
    engine.save_checkpoint(folder, "t")
    engine.destroy()


def _go_on(folder: str, layout: str) -> tuple[float, float, dict[str, Tensor], int]:
    _, stages, pipeline, level = LAYOUTS[layout]
    engine = _start(stages, pipeline, level)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    loss = float(engine.train_batch(_batch(engine, 1)))
    params = {name: value.clone() for name, value in full_parameters(engine.module).items()}
    norm, steps = engine.get_global_grad_norm(), engine.global_steps
    engine.destroy()
    return loss, norm, params, steps


@pytest.mark.in_make_test("2 stages 1f1b-no pipeline", "no pipeline-2 stages interleaved", "2 stages x 2-2 stages 1f1b")
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("2 stages 1f1b", "no pipeline"),
        ("no pipeline", "2 stages interleaved"),
        ("2 stages interleaved", "one rank"),
        ("one rank", "2 stages 1f1b"),
        ("2 stages x 2", "2 stages 1f1b"),
        ("2 stages 1f1b", "4 stages"),
        pytest.param("4 stages", "2 stages x 2", marks=pytest.mark.exhaustive),
        pytest.param("2 stages x 2", "one rank", marks=pytest.mark.exhaustive),
        pytest.param("no pipeline", "2 stages x 2", marks=pytest.mark.exhaustive),
    ],
)
def test_any_number_of_stages_to_any_other(
    request: pytest.FixtureRequest, tmp_path: Any, saved: str, loaded: str
) -> None:
    pools: list[RankPool] = [request.getfixturevalue(f"pool{LAYOUTS[name][0]}") for name in (saved, loaded)]
    pools[0].run(_save, str(tmp_path), saved)
    losses, norms, expected = pipes.plain_run(pipes.layers(6), micros=MICROS, data_ranks=1, steps=2)
    for loss, norm, params, steps in pools[1].run(_go_on, str(tmp_path), loaded):
        assert steps == 2
        assert pipes.worst(([loss], [norm], params), (losses[1:], norms[1:], expected)) <= 1e-6


def _with_groups(stages: int) -> Any:
    """Rates grow with the stage; norms and biases have a group without decay, and on the first of two are frozen."""
    module = PipelineModule(pipes.layers(4, tied=False), num_stages=stages, loss_fn=pipes.cross_entropy)
    stage = dist.get_rank() if stages > 1 else 0
    flat = [p for p in module.parameters() if p.dim() < 2]
    for param in flat if stages > 1 and stage == 0 else ():
        param.requires_grad_(False)
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "lr": 0.01 + 0.02 * stage, "weight_decay": 0.1},
        {"params": flat, "lr": 0.05, "weight_decay": 0.0},
    ]
    schedule = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    config = pipes.config(1, MICROS * stages // dist.get_world_size(), scheduler=schedule)
    return pipes.start(module, config, model_parameters=groups)


def _own_groups(folder: str) -> tuple[list[Any], list[bool], str, int]:
    """Groups of this stage in the run that goes on and in one that loads it, and whether weights are equal; what a load
    without stages says, and how many updates one has that follows the advice.
    """
    engine, other, whole = _with_groups(2), _with_groups(2), _with_groups(1)
    engine.train_batch(_batch(engine, 0))
    engine.save_checkpoint(folder, "t")
    other.load_checkpoint(folder)
    groups, weights = [], []
    for one in (engine, other):
        one.train_batch(_batch(one, 1))
        groups.append([(group["lr"], group["weight_decay"]) for group in one.basic_optimizer.param_groups])
        weights.append(full_parameters(one.module))
    said = outcome(lambda: whole.load_checkpoint(folder, load_module_strict=False))
    whole.load_checkpoint(folder, load_optimizer_states=False)
    steps = whole.global_steps
    for one in (engine, other, whole):
        one.destroy()
    return groups, [equal(*weights)], said, steps


def test_each_stage_goes_on_with_its_own_groups(pool2: RankPool, tmp_path: Path) -> None:
    ranks = pool2.run(_own_groups, str(tmp_path))
    assert [groups for groups, *_ in ranks] == [[[(0.0025, 0.1)]] * 2, [[(0.0075, 0.1), (0.0125, 0.0)]] * 2]
    for _, same, said, steps in ranks:
        assert same == [True] and "3 optimizer parameter groups" in said and "pipeline stages" in said and steps == 1
    groups = find_and_open(tmp_path).facts["optimizer"]["groups"]
    assert [group["options"]["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    names = [name for group in groups for name in group["names"]]
    assert len(names) == len(set(names)) and all(group["names"] for group in groups)
