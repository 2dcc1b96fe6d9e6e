"""Every command ends with 0 when all is well, 1 where something is wrong, 2 for wrong input: docs/tools.md says so."""

import importlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tqdm

from deepspeed.checkpoint.format.folders import begin
from deepspeed.client.comm import comms_log
from deepspeed.config import load_config
from deepspeed.engine.initialize import _log_notes
from deepspeed.errors import CheckpointError, counted
from deepspeed.launcher import runner
from deepspeed.launcher.node.verdict import RankEnd
from deepspeed.monitor.log import logger
from deepspeed.monitor.program import CheckFailedError, guarded
from deepspeed.tools.checkpoint.info import _shown
from deepspeed.tools.verify.cli import GATES
from deepspeed.tools.verify.driver import Driver
from tests.budget.source import ROOT
from tests.budget.test_needs import SCRIPTS
from tests.harness.logs import logged

SAME = ("ds", "dsr", "deepspeed.pt")  # other names of two commands
MAINS = {name: place for name, place in SCRIPTS.items() if name not in SAME}
TIMED = ["loop", "gas", "optim", "lr", "teardown", "compile", "offload", "data", "resume", "3d", "moe"]
TOLERANT = ["grads", "loop", "gas", "optim", "compile", "3d", "moe"]
MEASURES = ["io", "ckpt", "load", "access", "step", "vs-fsdp2", "cpu-adam", "stream", "generate"]
NOT_NUMBERS = ("0", "-1", "nan", "inf", "soon")

# what is written behind the command -> what standard error has of it; {} is a folder with a configuration
WRONG: dict[str, str] = {
    "deepspeed": "the following arguments are required: script\n",  # and nothing else
    "deepspeed --num_gpus none train.py": "num_gpus",
    "deepspeed --num_gpus 1 {}/none.py": "does not exist",
    "ds_bench": "nothing to measure was named",
    "ds_bench comm": "there is no measurement 'comm'",
    "ds_bench lod": "there is no measurement 'lod', did you mean 'load'?",
    **{f"ds_bench {what} --rows 0": "whole number from 1" for what in ("access", "step", "vs-fsdp2")},
    "ds_bench access --params 1e13": "GB of memory and",
    "ds_bench ckpt --folder {}/none": "does not exist",
    "ds_bench io --folder {}/none": "none",
    "ds_bench io {}/none": "none",
    "ds_bench load --model {}/none": "has no *.safetensors files",
    "ds_bench cpu-adam --params 0": "no number of parameters",
    "ds_bench stream --max-bytes none": "no size",
    "ds_bench ckpt --folder . --async --sync": "not allowed with",
    "ds_bench nvme": "ds_bench nvme: error:",
    **{
        f"ds_bench {words}": f"argument {words.split()[1]}: "
        for words in ("access --zero 4", "cpu-adam --threads 4097", "step --steps 0", "stream --ranks 1")
    },
    "ds_bench vs-fsdp2 --ranks none": "argument --ranks: ",
    "ds_bench generate --tokens 0": "whole number from 1",
    "ds_checkpoint": "required",
    "ds_checkpoint info {}/none": "none",
    "ds_checkpoint verify {}/none": "none",
    "ds_checkpoint diff {}/none {}/none": "none",
    "ds_checkpoint nonsense": "invalid choice",
    "ds_checkpoint prune {}": "--keep-last",
    "ds_checkpoint prune {} --keep-last 0": "argument --keep-last: ",
    "ds_checkpoint export {} {}/out": "--format",
    "ds_checkpoint export --format hf {}/none {}/out": "none",
    "ds_config": "required",
    "ds_config check {}/none.json": "none.json",
    "ds_config check {}/wrong.json": "zero_optimisation",
    "ds_config check {}/ds.json --world 0": "whole number from 1",
    "ds_config show {}/none.json": "none.json",
    "ds_config init --goal nothing": "invalid choice",
    "ds_config init --output {}/ds.json": "is there already",
    "ds_io": "",
    "ds_io --folder {}/none": "",
    "ds_io --warmup_loops -1": "whole number from 0",
    **{
        f"ds_io --folder {{}} {words}": words.split()[0]
        for words in ("--gpu", "--multi_process 4", "--block_size 1000", "--engine torch_io", "--loops 0")
    },
    "ds_nvme_tune": "",
    **{f"ds_nvme_tune --seconds {text}": "no number from 0 on" for text in NOT_NUMBERS[1:]},
    "ds_plan": "--model and --config must be given",
    "ds_plan --config {}/none.json --model gpt2": "none.json",
    "ds_plan --config {}/ds.json --model my:model --gpus 0": "whole number from 1",
    "ds_plan --config {}/ds.json --model my:model --gpu much": "no size",
    **{f"ds_plan --config {{}}/ds.json --model my:model --lora {r}": "whole number from 1" for r in ("0", "r=", "-4")},
    "ds_plan --config {}/ds.json --model my:model --lora_targets q_proj": "--lora_targets is about adapters",
    "ds_plan --config {}/ds.json --model my:model --lora 4 --lora_dtype int8": "invalid choice",
    "ds_report --none": "unrecognized",
    "ds_report run {}/none": "none",
    "ds_report --job {}/none": "none",
    "ds_simulate": "",
    "ds_simulate --config {}/none.json --gpus 2 --model gpt2": "none.json",
    "ds_simulate --config {}/ds.json --gpus 0": "whole number from 1",
    "ds_simulate --config {}/ds.json --gpus 2 --rank -1": "whole number from 0",
    **{f"ds_simulate --config {{}}/ds.json --model m --max-exposed {n}": "--max-exposed" for n in ("2", "many")},
    "ds_simulate --model m.json": "--config must be given, or --calibrate FILE",
    "ds_simulate --calibrate mine.json --model m.json --gpus 2": "leave out --model, --gpus",
    "ds_simulate --calibrate mine.json --no-sync": "leave out --no-sync",
    "ds_simulate --drive . --model m.json --config c.json": "--drive is a part of --calibrate FILE",
    "ds_ssh": "no command to run",
    "ds_ssh -f {}/none hostname": "none",
    "ds_verify": "required",
    "ds_verify nothing": "invalid choice",
    **{f"ds_verify grads --time-limit {text}": "no number above 0" for text in NOT_NUMBERS},
    **{f"ds_verify {name} --time-limit 0": "no number above 0" for name in TIMED},
    **{f"ds_verify {name} --tolerance nan": "no number from 0" for name in TOLERANT},
    "ds_verify teardown --growth -1": "no number from 0",
    "ds_verify grads --ranks 0": "whole number from 1",
    "ds_verify grads --steps many": "whole number from 1",
    "ds_verify grads --model nothing.of:that": "nothing",
    "ds_verify grads --config {}/none.json": "none.json",
    "ds_verify offload --folder {}/none": "no folder",
    "ds_verify offload --model no_such_module:build": "no_such_module",
    "ds_verify offload --config {}/none.json": "none.json",
    "ds_verify grads --model no_such_module:build": "cannot import 'no_such_module'",
    "ds_verify grads --model just_text": "module:function",
    "ds_verify 3d --ranks 6": "--ranks 6 cannot be cut into 2 pipeline stages x 2 tensor-parallel ranks",
    "ds_verify 3d --matrix --pp 2": "--matrix goes through all of them; leave --pp out",
    "ds_verify resume --at 20": "between the first and the last",
    "ds_verify data --samples 10 --batch 2 --save-n 2 --at 4": "has 3 steps of 2 x 2",
    **{
        f"ds_verify {words}": f"argument {words.split()[1]}: "
        for words in (
            *(
                "resume --load-ranks 0",
                "resume --at 0",
                "data --save-n 0",
                "crash --kills 0",
                "crash --folder /no/such",
            ),
            *("offload --steps 0", "loop --steps 0", "teardown --cycles none", "gas --tolerance x"),
        )
    },
    "ds_verify data --workers -1": "whole number from 0",
    "ds_verify data --at 99999": "--at 99999",
    "ds_verify crash --seed -1": "whole number from 0",
    "ds_verify schedule --schedule none": "invalid choice",
    "ds_verify schedule --hop inf": "no number from 0",
    "ds_verify schedule --costs 1 1 -1": "",
    "ds_verify schedule --stages 0": "whole number from 1",
}
FINE = (
    *(f"{name} --help" for name in MAINS),
    *(f"ds_bench {name} --help" for name in MEASURES),
    "ds_config check {}/ds.json",
    "ds_config init --goal pretrain",
    "ds_verify schedule --stages 2 --micro-batches 2",
)


def status_of(words: Sequence[str]) -> int:
    module, _, name = MAINS[words[0]].partition(":")
    main: Callable[[Sequence[str]], int | None] = getattr(importlib.import_module(module), name)
    try:
        return main(words[1:]) or 0
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0 if left.code is None else 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "optimizer": {"type": "AdamW"}}))
    (tmp_path / "wrong.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimisation": {}}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_wrong_input_is_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong, there = [], sorted(folder.iterdir())
    for line, words in WRONG.items():
        status = status_of(line.format(*[folder] * 2).split())
        said = capsys.readouterr().err
        if status != 2 or words not in said or not said.strip() or "Traceback" in said:
            wrong.append((line, status, said))
    assert not wrong and sorted(folder.iterdir()) == there


@pytest.mark.parametrize("line", FINE)
def test_what_is_well_is_0(folder: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert status_of(line.format(folder).split()) == 0 and capsys.readouterr().out.strip()


def test_a_check_that_fails_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    def check() -> int:
        raise CheckFailedError("above the bound")

    assert guarded("ds_bench load", check) == 1 and capsys.readouterr().err == "ds_bench load: above the bound\n"


def test_every_command_is_in_these_tables() -> None:
    assert {*os.listdir(ROOT / "bin"), "deepspeed.pt"} == set(SCRIPTS)
    assert {line.split()[0] for line in WRONG} == {line.split()[0] for line in FINE} | {"ds_simulate"} == set(MAINS)


# -- commands before torch ------------------------------------------------------------------------------------------
CHECKPOINTS = ("verify", "info", "diff", "audit", "export", "import", "prune")
HELP = [
    *(f"{name} --help" for name in MAINS),
    *(f"ds_bench {name} --help" for name in MEASURES),
    *(f"ds_checkpoint {name} --help" for name in CHECKPOINTS),
    *(f"ds_config {name} --help" for name in ("check", "show", "init")),
    *(f"ds_verify {name} --help" for name in GATES),
    "ds_report run --help",
]
# Right lines about what is not there: a model, memory, a drive, a place in an epoch or a run.
LOOKS = (
    *("ds_bench access --params", "ds_bench ckpt", "ds_bench io", "ds_bench load", "ds_io --folder"),
    *("ds_verify grads --model", "ds_verify grads --config", "ds_verify data --at", "ds_verify data --samples"),
    *("ds_verify resume --at 20", "ds_verify 3d --", "ds_verify offload --model", "ds_verify offload --config"),
)
LINES = [*HELP, *(line for line in WRONG if not line.startswith(LOOKS))]

# One interpreter, which imports what the commands begin with, and a child of it for each line.
FORKS = """
import importlib, json, os, sys
wrong, lines = [], json.loads(sys.argv[1])
for place in lines.values():
    importlib.import_module(place.partition(":")[0])
for line, place in lines.items():
    child = os.fork()
    if child == 0:
        status = 1
        sys.stdout = sys.stderr = open(os.devnull, "w")
        try:
            module, _, name = place.partition(":")
            status = getattr(importlib.import_module(module), name)(line.split()[1:])
        except SystemExit as left:
            status = left.code
        except BaseException:
            status = 1
        os._exit(9 if "torch" in sys.modules else 0 if status in (None, 0, 2) else 1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        wrong.append(line)
print(json.dumps(wrong))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_help_and_wrong_lines_import_no_torch(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "optimizer": {"type": "AdamW"}}))
    (tmp_path / "wrong.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimisation": {}}))
    lines = {line.format(*[tmp_path] * 2): MAINS[line.split()[0]] for line in LINES}
    command = [sys.executable, "-c", FORKS, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout) == [], done


# -- plain messages -------------------------------------------------------------------------------------------------
def test_one_of_a_thing_is_no_plural() -> None:
    assert [counted(n, "unit") for n in (0, 1, 2, 12345)] == ["0 units", "1 unit", "2 units", "12,345 units"]
    assert Driver(Namespace(ranks=1, steps=1), io.StringIO()).conditions() == "1 rank, 1 step each"


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
    assert [_shown(value) for value in ((0.1).hex(), (-2.5).hex(), "AdamW", 3)] == ["0.1", "-2.5", "AdamW", "3"]


def test_offload_param_without_effect_is_a_warning() -> None:
    for stage in (2, 3):
        zero = {"stage": stage, "offload_param": {"device": "cpu"}}
        config = load_config({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)
        with logged(logging.WARNING) as lines:
            _log_notes(config)
        assert len([line for line in lines if "offload_param" in line]) == (stage < 3)


def test_many_keys_without_effect_are_one_short_line() -> None:
    zero = dict.fromkeys(("contiguous_gradients", "elastic_checkpoint", "round_robin_gradients"), True)
    config = load_config({"train_batch_size": 1, "zero_optimization": {"stage": 2, **zero}}, world_size=1)
    with logged(logging.INFO, set_level=logging.INFO) as lines:
        _log_notes(config)
    names = ", ".join(f"zero_optimization.{name}" for name in zero)
    assert lines == [f"[rank 0] configuration keys without effect here: {names} (ds_config check says why)"]


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


# -- log above bars -------------------------------------------------------------------------------------------------
def test_a_line_of_the_log_stands_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(logger.handlers[0], "stream", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    with tqdm.tqdm(total=2, file=terminal, ascii=True, mininterval=0, ncols=60) as bar:
        bar.update()
        logger.warning("one line")
        bar.update()
    written = [part for line in terminal.getvalue().split("\n") for part in line.split("\r") if part.strip()]
    (line,) = [part for part in written if "one line" in part]
    assert line.endswith("one line") and "it/s" not in line, written
    assert any("50%" in part for part in written) and "100%" in written[-1]


def test_without_a_bar_nothing_is_asked_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(logger.handlers[0], "stream", terminal)
    monkeypatch.setattr(tqdm.tqdm, "external_write_mode", None)
    logger.warning("one line")
    assert terminal.getvalue().endswith("one line\n")
