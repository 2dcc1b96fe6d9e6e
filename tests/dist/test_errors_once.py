"""An error of the configuration or of a call ends a job with one text, by the first rank, without frames of ours; an
ordinary error ends it as ever.
"""

import re
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import deepspeed
from deepspeed.client.comm import faults
from deepspeed.client.comm.faults import _of_ended, _speaks
from deepspeed.comm.hang.explain import RankReport
from deepspeed.comm.init import free_port
from deepspeed.errors import DeepSpeedConfigError, UsageError
from tests.harness.launched import RUNNER, environment
from tests.harness.patience import too_long
from tests.harness.warm import RANKS, Warm

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import signal
import sys
import torch
import deepspeed

def main(fault):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    if fault == "key":
        config["zero_optimisation"] = {"stage": 2}
    if fault == "package":
        config["comet"] = {"enabled": True}
    if fault == "told":
        config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    model = torch.nn.Linear(4, 4)
    if fault == "nothing":
        deepspeed.initialize(model=model)
    engine = deepspeed.initialize(model=model, config=config)[0]
    if fault == "alone" and engine.global_rank == 1:
        engine.step()
    if fault == "order":
        engine.step()
    if fault == "ctrl-c":
        engine.module.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    for step in range(5 if fault == "ends" else 1):
        if step == 3 and engine.global_rank == 1:
            sys.exit()
        width = 5 if fault == "told" and engine.global_rank == 1 else 4
        engine.backward(engine(torch.ones(1, width)).sum())
        engine.step()
    if fault == "saves alone" and engine.global_rank == 0:
        engine.save_checkpoint("ck")

main(sys.argv[-1])
"""


def _ended(folder: Path, python: str, fault: str, *, status: int = 1, **variables: str) -> str:
    """Standard error of two ranks that end by ``fault``. ``python`` starts the launcher; without, torchrun does."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    env = environment(**variables)
    command = [python, *RUNNER, "--num_gpus", "2"]
    if python and fault != "ctrl-c" and not variables:  # which a warm rank has read before
        env[RANKS] = python
    if not python:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
        command += [str(free_port())]
    done = subprocess.run(
        [*command, str(script), fault], cwd=folder, env=env, text=True, capture_output=True, timeout=200
    )
    assert done.returncode == status, done.stderr
    return done.stderr


FAULTS = {
    "key": "zero_optimisation: unknown key, did you mean 'zero_optimization'?",
    "package": "comet.enabled needs the package comet_ml, which cannot be imported here. Install it with: pip install",
    "nothing": "no configuration was given: pass config=",
    "order": "step() was called before backward()",
}


@pytest.mark.parametrize("fault", ["key", *(pytest.param(f, marks=pytest.mark.exhaustive) for f in [*FAULTS][1:])])
def test_a_fault_of_all_ranks_is_said_once_by_the_first(tmp_path: Path, warm: Warm, fault: str) -> None:
    err = _ended(tmp_path, warm.python, fault)
    assert err.count(FAULTS[fault]) == 1 and "[rank1]" not in err, err
    files = re.findall(r'File "([^"]+)"', err)
    assert files == [str(tmp_path / "train.py")] * 2, "frames of the user's alone"
    assert "deepspeed: rank 0 (pid" in err.splitlines()[-1], "and the launcher's last line says no more"


@pytest.mark.exhaustive
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_fault_of_another_rank_is_said_by_that_one(tmp_path: Path, warm: Warm, torchrun: bool) -> None:
    err = _ended(tmp_path, "" if torchrun else warm.python, "alone")
    # The first rank may be ended before or after it tells whom it has waited for.
    said = re.findall(r"^\[rank(\d)\]: \S*UsageError: step\(\) was called before backward\(\)", err, re.MULTILINE)
    assert said == ["1"] and "[rank1]: Traceback" in err, err


@pytest.mark.exhaustive
def test_under_torchrun_it_is_said_once_too(tmp_path: Path) -> None:
    err = _ended(tmp_path, "", "key")
    assert err.count(FAULTS["key"]) == 1 and "[rank0]: Traceback" in err, err


@pytest.mark.exhaustive
def test_with_the_log_at_debug_every_rank_shows_every_frame(tmp_path: Path, warm: Warm) -> None:
    err = _ended(tmp_path, warm.python, "key", DS_LOG_LEVEL="DEBUG")
    assert err.count(FAULTS["key"]) >= 3 and "initialize.py" in err, "each rank, and the launcher"


def test_a_rank_that_is_told_of_anothers_error_shows_the_users_lines_alone(tmp_path: Path, warm: Warm) -> None:
    err = _ended(tmp_path, warm.python, "told")
    told = [line for line in err.splitlines() if line.startswith("[rank0]:")]
    said = r"RuntimeError: (addmm: )?mat1"  # the prefix since torch 2.15
    assert re.search(r"RankFailedError: rank 1 failed \(step 0, forward\): " + said, told[-1]), err
    assert not any("deepspeed/" in line for line in told[:-1]), err
    assert "deepspeed: rank 1 " in err and "Its traceback" in err and re.match(said, err.rstrip().splitlines()[-1]), err


@pytest.mark.exhaustive  # test_interrupts.py has it without a job
def test_ctrl_c_shows_the_lines_of_the_user_alone_and_once(tmp_path: Path, warm: Warm) -> None:
    err = _ended(tmp_path, warm.python, "ctrl-c", status=130)
    assert err.count("KeyboardInterrupt") == 1 and "engine.py" not in err, err


@pytest.mark.exhaustive  # the next one has it of a rank that saves
def test_who_waits_for_a_rank_that_has_ended_says_which_and_when(tmp_path: Path, warm: Warm) -> None:
    err = _ended(tmp_path, warm.python, "ends")
    assert "rank 1 has ended after 3 updates: its script has ended" in err, err
    assert "peer" not in err and "engine.py" not in err, err


def test_a_rank_that_saves_alone_is_told_that_all_have_to(tmp_path: Path, warm: Warm) -> None:
    err = _ended(tmp_path, warm.python, "saves alone")
    assert "rank 1 has ended after 1 update: its script has ended. This rank waits for it in save_checkpoint()" in err
    assert "Every rank has to call save_checkpoint(), not one alone" in err and "batches" not in err, err
    assert "peer" not in err and "engine.py" not in err, err


def test_the_error_of_a_rank_that_has_failed_comes_without_advice_about_batches() -> None:
    failed, ended = RankReport(1, step=3, error="ValueError: bad"), RankReport(2, step=4, what="its script has ended")
    assert str(_of_ended([failed])) == "rank 1 has ended after 3 updates: ValueError: bad. This rank waits for it"
    assert "as many batches" in str(_of_ended([ended])) and "as many batches" not in str(_of_ended([failed, ended]))


def test_a_rank_whose_store_ended_with_the_first_says_its_error_itself_and_at_once() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=100))
    this = {"is_initialized": True, "get_backend": "gloo", "get_rank": 1}
    functions = {name: mock.Mock(return_value=value) for name, value in this.items()}
    with mock.patch.multiple(dist, **functions), mock.patch.object(faults, "_FIRST_S", 0.1):
        attempts = [mock.Mock(return_value=dist.PrefixStore(f"attempt{i}", store)) for i in range(2)]
        with mock.patch.object(dist.distributed_c10d, "_get_default_store", attempts[0]):
            with mock.patch.object(dist, "get_rank", mock.Mock(return_value=0)):
                assert _speaks(UsageError("of all"))
            assert not _speaks(UsageError("of all"))
        with mock.patch.object(dist.distributed_c10d, "_get_default_store", attempts[1]):
            assert _speaks(UsageError("of all")), "what was said before a launcher started the job anew is no news"
            del server
            begun = time.monotonic()
            assert _speaks(UsageError("later"))
            assert not too_long(begun, 20)


def test_an_error_inside_a_users_finally_comes_with_the_one_that_led_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append("".join(traceback.format_exception(*error))))
    faults.show_plainly.__wrapped__()
    (tmp_path / "ds.json").write_text("{")  # in whose reading Python raises an error, too
    for expected in (["of the user's", "ds.json"], ["ds.json"]):
        try:
            try:
                if len(expected) == 2:
                    raise ValueError(expected[0])
            finally:
                deepspeed.DeepSpeedConfig(str(tmp_path / "ds.json"))
        except DeepSpeedConfigError as error:
            assert error.__context__ is not None
            sys.excepthook(type(error), error, error.__traceback__)
        raised = re.findall(r"^\S*Error: (.*)", shown.pop(), re.MULTILINE)
        assert len(raised) == len(expected) and all(map(str.__contains__, raised, expected)), raised
