"""Every command ends with 0 when all is well, 1 where something is wrong, 2 for wrong input: docs/tools.md says so."""

import importlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deepspeed.monitor.program import CheckFailedError, guarded
from tests.budget.source import ROOT

MAINS = {
    "deepspeed": "deepspeed.launcher.runner:main",
    "ds_bench": "deepspeed.tools.bench.cli:main",
    "ds_checkpoint": "deepspeed.tools.checkpoint.cli:main",
    "ds_config": "deepspeed.tools.config.cli:main",
    "ds_io": "deepspeed.tools.bench.cli:ds_io",
    "ds_nvme_tune": "deepspeed.tools.bench.cli:ds_nvme_tune",
    "ds_plan": "deepspeed.tools.simulate.plan.cli:main",
    "ds_report": "deepspeed.tools.report.cli:main",
    "ds_simulate": "deepspeed.tools.simulate.cli:main",
    "ds_ssh": "deepspeed.launcher.ds_ssh:main",
    "ds_verify": "deepspeed.tools.verify.cli:main",
}
SAME = {"ds": "deepspeed", "dsr": "ds_report"}
TIMED = ["loop", "gas", "optim", "lr", "teardown", "compile", "offload", "data", "resume", "3d", "moe"]
TOLERANT = ["grads", "loop", "gas", "optim", "compile", "3d", "moe"]
MEASURES = ["io", "ckpt", "load", "access", "vs-fsdp2", "cpu-adam", "stream"]
NOT_NUMBERS = ("0", "-1", "nan", "inf", "soon")

# what is written behind the command -> what standard error has of it; {} is a folder with a configuration
WRONG: dict[str, str] = {
    "deepspeed": "",
    "deepspeed --num_gpus none train.py": "num_gpus",
    "deepspeed --num_gpus 1 {}/none.py": "does not exist",
    "ds_bench": "nothing to measure was named",
    "ds_bench comm": "there is no measurement 'comm'",
    "ds_bench lod": "there is no measurement 'lod', did you mean 'load'?",
    **{f"ds_bench {what} --rows 0": "whole number from 1" for what in ("access", "vs-fsdp2")},
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
        for words in ("access --zero 4", "cpu-adam --threads 4097", "stream --ranks 1")
    },
    "ds_bench vs-fsdp2 --ranks none": "argument --ranks: ",
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
    programs = {name: SAME.get(name, name) for name in os.listdir(ROOT / "bin")}
    assert set(programs.values()) == set(MAINS)
    assert {line.split()[0] for line in WRONG} == {line.split()[0] for line in FINE} | {"ds_simulate"} == set(MAINS)
