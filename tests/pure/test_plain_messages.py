"""What a newcomer meets first is said in plain words: counts, the command line, a killed rank, a file as a folder."""

import io
import json
import logging
import os
import signal
from argparse import Namespace
from pathlib import Path

import pytest

from deepspeed.checkpoint.format.folders import begin
from deepspeed.client.comm import comms_log
from deepspeed.config import load_config
from deepspeed.engine.initialize import _log_notes
from deepspeed.errors import CheckpointError, counted
from deepspeed.launcher import runner
from deepspeed.launcher.node.verdict import RankEnd
from deepspeed.tools.checkpoint.info import _shown
from deepspeed.tools.config.cli import main as ds_config
from deepspeed.tools.verify.driver import Driver
from tests.harness.logs import logged


def test_one_of_a_thing_is_no_plural() -> None:
    assert [counted(n, "unit") for n in (0, 1, 2, 12345)] == ["0 units", "1 unit", "2 units", "12,345 units"]
    assert Driver(Namespace(ranks=1, steps=1), io.StringIO()).conditions() == "1 rank, 1 step each"


def test_without_a_script_the_script_alone_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.parse_args([])
    assert capsys.readouterr().err.rstrip().endswith("the following arguments are required: script")


def test_a_flag_behind_the_script_is_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with logged(logging.WARNING) as lines:
        runner.main(["--dry_run", "t.py", "--num_gpus=1", "--steps", "3"])
    assert lines == ["--num_gpus=1 comes after the script, which gets it; flags of deepspeed go before the script"]


def test_more_ranks_than_cores_are_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    cores = len(os.sched_getaffinity(0))
    for ranks in (cores, 32 * cores):
        with logged() as lines:
            runner.main(["--num_gpus", str(ranks), "--dry_run", "t.py"])
        said = [line for line in lines if "share" in line]
        assert len(said) == (ranks > cores) and all(f"{ranks} ranks share {counted(cores, 'core')}" in x for x in said)


def test_a_rank_that_sigkill_has_ended_hints_at_memory() -> None:
    killed = RankEnd(1, 11, -signal.SIGKILL, 10.0).verdict(show_traceback=True)
    assert killed.status == 137 and "memory" in killed.text and "dmesg" in killed.text
    assert "memory" not in RankEnd(1, 11, 3, 10.0).verdict(show_traceback=True).text


def test_a_checkpoint_into_a_file_says_that_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("")
    with pytest.raises(CheckpointError, match="afile is a file, not a folder; save to another one"):
        begin(tmp_path / "afile", "tag")


def test_numbers_that_are_kept_by_their_bits_are_shown_as_decimals() -> None:
    assert [_shown(value) for value in ((0.1).hex(), (-2.5).hex(), "AdamW", 3)] == [
        "0.1",
        "-2.5",
        "AdamW",
        "3",
    ]


@pytest.mark.parametrize(("stage", "level"), [(2, logging.WARNING), (3, None)])
def test_offload_param_without_effect_is_a_warning(
    stage: int, level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    zero = {"stage": stage, "offload_param": {"device": "cpu"}}
    config = load_config({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(caplog.handler)
    try:
        _log_notes(config)
    finally:
        logger.removeHandler(caplog.handler)
    levels = [record.levelno for record in caplog.records if "offload_param" in record.getMessage()]
    assert levels == ([] if level is None else [level])


def test_many_keys_without_effect_are_one_short_line() -> None:
    zero = dict.fromkeys(("contiguous_gradients", "elastic_checkpoint", "round_robin_gradients"), True)
    config = load_config({"train_batch_size": 1, "zero_optimization": {"stage": 2, **zero}}, world_size=1)
    with logged(logging.INFO, set_level=logging.INFO) as lines:
        _log_notes(config)
    names = ", ".join(f"zero_optimization.{name}" for name in zero)
    assert lines == [f"[rank 0] configuration keys without effect here: {names} (ds_config check says why)"]


def test_the_table_of_dtypes_comes_with_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 1, "gradient_clipping": 0.5}))
    assert ds_config(["show", str(tmp_path / "ds.json"), "--dtypes"]) == 0
    out = capsys.readouterr().out
    assert "gradient_clipping" in out and "master weights" in out


def test_a_communication_log_shows_its_table_at_the_end_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    log, ends = comms_log.CommsLog(), []
    monkeypatch.setattr(comms_log, "LOG", log)
    monkeypatch.setattr(comms_log.atexit, "register", ends.append)
    comms_log._summarize_at_end.cache_clear()
    comms_log.configure({"comms_logger": {"enabled": False}})
    assert not ends
    comms_log.configure({"comms_logger": {}})
    (end,) = ends
    log.record("all_reduce", 4096, 1.5, 2)
    with logged() as lines:
        end()
        log.shown = log.count()  # as log_summary() leaves it
        end()
    comms_log._summarize_at_end.cache_clear()
    assert len([line for line in lines if "all_reduce" in line and "4096" in line]) == 1
