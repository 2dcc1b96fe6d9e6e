"""Models that are born on a drive, states that are lent and come back, and the gate that users run themselves."""

import errno
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.tools.verify.cli import main
from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import case_named
from deepspeed.tools.verify.resume import first_difference
from tests.harness.lockstep import equal
from tests.harness.pool import RankPool
from tests.harness.training import make_config, outcome, start, train_step

pytestmark = pytest.mark.timeout(180)
WIDTH = 192  # weights beyond the size that is worth a page on a drive


class Wide(nn.Module):
    """Blocks whose weights rest on the drive while the model is built; an init pass touches every one again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.apply(self._draw)

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
            module.weight.data.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def _train(engine: Any, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (engine(x) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _config(folder: str, *, away: bool) -> dict[str, Any]:
    drive = {"device": "nvme", "nvme_path": folder}
    zero = {"offload_optimizer": drive, "offload_param": {**drive, "max_in_cpu": 0}} if away else {}
    return make_config(3, zero={**zero, "param_persistence_threshold": 1000})


def born_on_a_drive() -> list[str]:
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        outcomes = []
        for away in (False, True):
            torch.manual_seed(3)
            config = _config(folder, away=away)
            with deepspeed.zero.Init(remote_device="nvme" if away else None, config_dict_or_path=config):
                model = Wide()
            if away:
                held = {type(s).__name__ for p in model.parameters() for s in p._ds_unit.rest.values() if s.on_drive}
                if held != {"Stored"}:
                    problems.append(f"the weights do not rest on the drive: {held}")
            engine = start(model, config)
            outcomes.append((_train(engine), full_parameters(model)))
            engine.destroy()
        if outcomes[0][0] != outcomes[1][0] or not equal(outcomes[0][1], outcomes[1][1]):
            problems.append("a model born on a drive trains differently")
        problems += [f"{name} is left behind" for name in map(str, Path(folder).iterdir())]
    return problems


@pytest.mark.in_make_test("2")
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_born_on_a_drive_trains_to_the_same_bits(world: int, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    assert pool.run(born_on_a_drive) == [[]] * world


ABSENT = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/no/such/drive"}}}


def _init_faults() -> list[str]:
    def born(remote: str, config: dict[str, Any] | None) -> None:
        with deepspeed.zero.Init(remote_device=remote, config_dict_or_path=config):
            Wide()

    return [outcome(lambda row=row: born(*row)) for row in (("nvme", None), ("tape", None), ("nvme", ABSENT))]


def test_zero_init_says_what_its_drive_needs(pool1: RankPool) -> None:
    (told,) = pool1.run(_init_faults)
    words = "needs a folder on the drive", "the places are 'cpu' and 'nvme'", "is the drive mounted"
    assert all("UsageError" in said and word in said for said, word in zip(told, words, strict=True)), told


def memory_that_ends_half_way(engine: Any) -> list[str]:
    """What has left the device by then comes back, and the engine is not lent."""
    came_back: list[str] = []

    def leave(back: list[Any], *_: Any, **__: Any) -> None:
        back.append(lambda: came_back.append("state"))
        raise OSError(errno.ENOMEM, "no memory")

    with mock.patch("deepspeed.engine.weights.leave_device", leave), pytest.raises(OSError, match="no memory"):
        engine.offload_states()
    problems = [] if came_back == ["state"] else ["a state stays away"]
    train_step(engine, case_named("plain"), 4)
    return problems


def room_that_comes_later(engine: Any) -> list[str]:
    """A state that finds no room on the device is away, as the engine says, until a later call brings it back."""
    came_back, problems = list[str](), list[str]()
    home = mock.Mock(side_effect=[torch.OutOfMemoryError("no room yet"), None])

    def leave(back: list[Any], *_: Any, **__: Any) -> bool:
        back.extend([lambda: came_back.append("first"), home, lambda: came_back.append("last")])
        return False

    with mock.patch("deepspeed.engine.weights.leave_device", leave):
        engine.offload_states()
    if "no room yet" not in outcome(engine.reload_states):
        problems.append("the error is not said")
    if "reload_states" not in outcome(engine.step):
        problems.append("the engine says that all are back")
    engine.reload_states()
    if home.call_count != 2 or came_back != ["last", "first"]:
        problems.append(f"a state stays away: {home.call_count}, {came_back}")
    train_step(engine, case_named("plain"), 5)
    return problems


def lend(stage: int) -> list[str]:
    """What differs of an engine whose states are away between two steps. Collective."""
    problems, case = [], case_named("plain")
    engine, plain = (start(case.build(), make_config(stage)) for _ in range(2))
    for step in range(4):
        if step == 2:
            engine.offload_states()
            for act in (lambda: train_step(engine, case, 2), engine.step):
                said = outcome(act)
                problems += [] if "UsageError" in said and "reload_states" in said else [f"a lent engine says {said!r}"]
            engine.reload_states()
        if train_step(engine, case, step) != train_step(plain, case, step):
            problems.append(f"losses differ at step {step}")
    if not equal(full_parameters(engine.module), full_parameters(plain.module)):
        problems.append("parameters differ")
    engine.optimizer.offload_states(include=["optim_states"])
    engine.optimizer.reload_states()
    if "ValueError" not in outcome(lambda: engine.offload_states(device="nvme")):
        problems.append("nvme is accepted")
    engine.offload_states(device="none")
    problems += memory_that_ends_half_way(engine)
    problems += room_that_comes_later(engine)
    engine.offload_states()
    engine.destroy()  # also while its states are away
    plain.destroy()
    return problems


@pytest.mark.in_make_test("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lent_states_come_back(stage: int, pool2: RankPool) -> None:
    assert pool2.run(lend, stage) == [[], []]


def build() -> nn.Module:
    """A user's model for the gate."""
    return Wide()


def build_with_random_draws() -> nn.Module:
    """A model that no tier can repeat."""
    model = Wide()
    model.register_forward_pre_hook(lambda _, args: (args[0] + torch.rand(1, generator=_ENTROPY),))
    return model


_ENTROPY = torch.Generator()
_ENTROPY.seed()


def test_the_gate_passes_on_a_users_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.json"
    config.write_text(
        json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": 64})
    )
    status = main(
        ["offload", "--model", f"{__name__}:build", "--config", str(config), "--steps", "2", "--folder", str(tmp_path)]
    )
    out = capsys.readouterr().out
    assert status == 0 and out.count("equal to the last bit") == 2 and "all equal" in out, out


def test_the_gate_names_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offload", "--model", f"{__name__}:build_with_random_draws", "--steps", "1", "--ranks", "1"]) == 1
    assert "differs after step 1" in capsys.readouterr().out


def test_a_difference_is_found_whatever_differs() -> None:
    base = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert first_difference(base, base) == ""
    assert first_difference(base, [base[0], {"a": "3"}]) == "b differs after step 2"
