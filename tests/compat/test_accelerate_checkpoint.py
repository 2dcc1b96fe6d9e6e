"""Accelerate: save_state and load_state into the engine that saved and into a new one, registered objects, whole
models.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat.common import LR, equal, everything, llama, need, sentences
from tests.compat.test_accelerate import accelerator, loader, minimal, prepared, student_and_teacher
from tests.harness.pool import RankPool

need("accelerate", "transformers")
pytestmark = pytest.mark.timeout(180)
BATCHES, SAVED = 8, 4  # two to a step


class Counter:
    """What people register: an object of their own with a state."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Run:
    """Everything of one Accelerate script."""

    def __init__(self, stage: int, kind: str, *, seed: int = 0) -> None:
        from accelerate.utils import DummyOptim, DummyScheduler

        config = None
        if kind == "configured":
            warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": LR, "warmup_num_steps": 8, "warmup_type": "linear"}
            config = {
                **minimal(stage),
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.5,
                "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": 1e-2}},
                "scheduler": {"type": "WarmupLR", "params": warmup},
            }
        self.acc = accelerator(stage, config, zero3_save_16bit_model=True)
        model = llama(attention_dropout=0.2)
        if seed:  # a new process begins with other weights
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(0.1)
        if kind == "configured":
            optimizer: Any = DummyOptim(model.parameters(), lr=LR)
            schedule: Any = DummyScheduler(optimizer)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-2)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        rows = sentences(2 * dist.get_world_size() * BATCHES)
        self.model, self.optimizer, self.data, self.schedule = self.acc.prepare(
            model, optimizer, loader(rows), schedule
        )
        self.model.train()
        self.counter = Counter()
        self.acc.register_for_checkpointing(self.counter)
        torch.manual_seed(seed)

    def go(self, first: int, last: int) -> list[float]:
        losses = []
        for batch in list(self.data)[first:last]:
            with self.acc.accumulate(self.model):
                loss = self.model(**batch).loss
                self.acc.backward(loss)
                if self.acc.sync_gradients:
                    self.acc.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.counter.seen += 1
            losses.append(float(loss.detach()))
        return losses

    def facts(self) -> Any:
        rates = self.schedule.get_last_lr(), self.optimizer.param_groups[0]["lr"]
        return (*rates, self.counter.seen, self.model.global_steps)

    def end(self) -> None:
        self.acc.free_memory(self.model)


def states(folder: str, stage: int, kind: str) -> dict[str, Any]:
    run = Run(stage, kind)
    run.go(0, SAVED)
    run.acc.save_state(folder)
    losses = run.go(SAVED, BATCHES)
    weights, facts = everything(run.model), run.facts()
    run.acc.load_state(folder)
    again = run.go(SAVED, BATCHES)
    found = {"same engine": again == losses and equal(everything(run.model), weights) and run.facts() == facts}
    run.end()
    new = Run(stage, kind, seed=3)
    new.acc.load_state(folder)
    fresh = new.go(SAVED, BATCHES)
    found["new engine"] = fresh == losses and equal(everything(new.model), weights) and new.facts() == facts
    new.end()
    return {**found, "losses": (losses, again, fresh), "facts": (facts, run.facts(), new.facts())}


@pytest.mark.parametrize(
    ("world", "stage", "kind"), [(1, 2, "own"), (2, 0, "own"), (2, 2, "own"), (2, 3, "own"), (2, 3, "configured")]
)
def test_load_state_goes_on_as_if_nothing_had_happened(stage: int, kind: str, tmp_path: Path, pool: RankPool) -> None:
    for found in pool.run(states, str(tmp_path), stage, kind, time_limit=120):
        assert found["same engine"] and found["new engine"], found
    assert (tmp_path / "pytorch_model" / "manifest.json").is_file(), "Accelerate chooses the tag"


def whole_models(folder: str, stage: int) -> dict[str, bool]:
    from safetensors.torch import load_file

    run = Run(stage, "own")
    run.go(0, 2)
    weights = everything(run.acc.unwrap_model(run.model))
    run.acc.save_model(run.model, folder)
    state = run.acc.get_state_dict(run.model)
    dist.barrier()
    saved = load_file(Path(folder) / "model.safetensors")
    found = {"saved": equal(weights, saved)}
    found["state"] = equal(weights, state) if state is not None else stage == 3 and dist.get_rank() > 0
    run.end()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_save_model_writes_the_trained_weights(stage: int, tmp_path: Path, pool2: RankPool) -> None:
    for found in pool2.run(whole_models, str(tmp_path), stage, time_limit=90):
        assert all(found.values()), found


def saved_together(folder: str) -> dict[str, bool]:
    """A trained engine and one without optimizer go into one folder under two tags."""

    def both(shift: float) -> tuple[Any, ...]:
        acc, *models = student_and_teacher()
        with torch.no_grad():
            for param in [p for m in models for p in m.parameters()]:
                param.add_(shift)
        return acc, *prepared(acc, *models)

    acc, trained, teacher, optimizer, data = both(0.0)
    for batch in data:
        acc.backward(trained(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    acc.save_state(folder)
    kept = everything(trained), everything(teacher)
    acc.free_memory(trained, teacher)
    acc, trained, teacher, *_ = both(0.5)
    acc.load_state(folder)
    found = {"student": equal(everything(trained), kept[0]), "teacher": equal(everything(teacher), kept[1])}
    acc.free_memory(trained, teacher)
    return found


def test_an_engine_without_optimizer_is_saved_beside_a_trained_one(tmp_path: Path, pool2: RankPool) -> None:
    for found in pool2.run(saved_together, str(tmp_path), time_limit=120):
        assert all(found.values()), found
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["pytorch_model", "pytorch_model_1"]
