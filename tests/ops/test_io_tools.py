"""``ds_io``, ``ds_bench io`` and ``ds_nvme_tune``: they measure, say what is wrong, and leave nothing behind."""

import argparse
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from deepspeed.config import load_config
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.monitor.program import INTERRUPTED, count_of
from deepspeed.tier.aio import AioEngine
from deepspeed.tools.bench import cli, common, io, tune
from deepspeed.tools.bench.io import Load, Target
from deepspeed.tools.bench.tune import SWEEP, Trial, best_of, with_block
from tests.budget.source import ROOT
from tests.harness.aio import KIB, MIB, refuse_direct
from tests.harness.offload import file_size_limit
from tests.harness.rows import for_each

SMALL = ["--io_size", "256K", "--block_size", "16K", "--queue_depth", "4"]
TUNE_SMALL = ["--io_size", "64K", "--seconds", "0"]


def start(name: str, *arguments: object) -> "subprocess.Popen[str]":
    """The command of a source tree."""
    command = [sys.executable, str(ROOT / "bin" / name), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def small_sweep(folder: Path) -> str:
    """A file with a sweep of two settings."""
    (folder / "sweep.json").write_text('{"block_size": ["16K", 65536], "queue_depth": [4], "single_submit": ["true"]}')
    return str(folder / "sweep.json")


def test_sizes() -> None:
    sizes = {"4096": 4096, "16K": 16 * KIB, "2m": 2 * MIB, "1G": 1 << 30, "3MiB": 3 * MIB}
    assert {text: common.size_of(text) for text in sizes} == sizes
    assert common.block_of("8M") == 8 * MIB
    wrong = [(common.size_of, text) for text in ("0", "-1", "1.5X")]
    for read, text in (*wrong, (common.block_of, "1000"), (count_of, "0")):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            read(text)


@pytest.mark.parametrize("chosen", [(), ("--read",), ("--write",), ("--read", "--write")])
def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], chosen: tuple[str, ...]) -> None:
    assert cli.ds_io(["--folder", str(tmp_path), *SMALL, "--validate", *chosen]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = [flag[2:] for flag in ("--write", "--read") if flag in chosen or not chosen]
    assert [line.split()[0] for line in lines[4:]] == [name for name in expected for _ in range(2)]
    for line in lines[4:]:
        words = line.split()
        assert words[1] in ("engine", "plain")
        assert float(words[3]) <= float(words[2]) <= float(words[4])
        assert words[5:] == [] if words[1] == "plain" else words[5].endswith("x")
    assert not list(tmp_path.iterdir())


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--loops", "2", "--warmup_loops", "1", "--include_warmup_time", "--sequential_requests"]
    options += ["--backend", "threads", "--threads", "3"]
    assert cli.main(["io", "--folder", str(tmp_path), *SMALL, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    settings = [found[name] for name in ("io_size", "block_size", "queue_depth", "io_parallel")]
    assert settings == [256 * KIB, 16 * KIB, 1, 3]
    assert found["backend"] in ("threads", "python") and found["unit"] == "GB/s"
    for ways in found["results"].values():
        assert len(ways["engine"]["all"]) == len(ways["plain"]["all"]) == 3
        assert ways["ratio"] == pytest.approx(ways["engine"]["median"] / ways["plain"]["median"])


def test_both_ways_move_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "PIECE_BYTES", 64 * KIB)
    monkeypatch.setattr(io.os, "unlink", lambda path: None)  # so that the file can be looked at
    target = Target(str(tmp_path), 200 * KIB)
    (path,) = tmp_path.iterdir()
    whole = (target.pattern.numpy().tobytes() * 4)[: 200 * KIB]
    with AioEngine(block_bytes=16 * KIB) as engine:
        for way in (lambda: io.through_engine(target, engine, Load(), write=True), lambda: write_plainly(target)):
            path.write_bytes(b"\0" * 200 * KIB)
            way()
            assert path.read_bytes() == whole
            io.check(target, engine)
        io.through_loop(target, Load(12 * KIB), write=False)
        assert torch.equal(target.scratch, target.pattern)
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(DeepSpeedError, match="between 196608 and 204800"):
            io.check(target, engine)
    target.close()


def write_plainly(target: Target) -> None:
    """The loop, with blocks that do not divide the memory."""
    io.through_loop(target, Load(24 * KIB), write=True)


def test_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refuse_direct(monkeypatch)
    assert cli.ds_io(["--folder", str(tmp_path), *SMALL]) == 0
    assert "has no O_DIRECT" in capsys.readouterr().out
    assert cli.ds_nvme_tune(["--nvme_dir", str(tmp_path), *TUNE_SMALL, "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert {trial["intra_op_parallelism"] for trial in trials} == {1, 2, 4, 8}  # threads matter there


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs")
def test_memory_filesystem(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.ds_io(["--folder", "/dev/shm", *SMALL, "--validate"]) == 0
    assert "/dev/shm" in capsys.readouterr().out
    assert not list(Path("/dev/shm").glob("ds_io.*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--folder", "{}/none"], "{}/none does not exist"),
        (["--folder", "{}/file"], "{}/file is not a folder"),
        (["--folder", "{}", "--io_size", "900T"], "of free space and the file takes"),
        (["--folder", "{}", "--io_size", "10000"], "multiple of 4096 bytes, not 10000"),
        (["--folder", "{}", "--io_size", "64K", "--queue_depth", "100000"], "queue_depth is 1 to 4096"),
    ],
)
def test_faults_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (tmp_path / "file").touch()
    assert cli.ds_io([each.format(tmp_path) for each in arguments]) == 2
    assert said.format(tmp_path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = os.open

    def refusing(path: str, flags: int, *more: int) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, "Read-only file system", path)
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    assert cli.ds_io(["--folder", str(tmp_path), *SMALL]) == 2
    assert f"no file can be made in {tmp_path}: Read-only file system" in capsys.readouterr().err


def test_no_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with file_size_limit(MIB):
        assert cli.ds_io(["--folder", str(tmp_path), "--io_size", "4M"]) == 2
        assert cli.ds_nvme_tune(["--nvme_dir", str(tmp_path), "--io_size", "4M"]) == 2
    assert capsys.readouterr().err.count("ulimit -f") == 2
    assert not list(tmp_path.iterdir())


def test_bench_says_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "ds_bench io" in capsys.readouterr().out
    assert cli.main(["all_reduce"]) == cli.main([]) == 2
    assert "there is no measurement 'all_reduce'" in capsys.readouterr().err


@pytest.mark.in_make_test("ds_io-2-130")
@pytest.mark.parametrize(
    ("ending", "status"),
    [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
@pytest.mark.parametrize("name", ["ds_io", "ds_nvme_tune"])
def test_an_interrupted_run_leaves_no_file(tmp_path: Path, name: str, ending: signal.Signals, status: int) -> None:
    endless = {
        "ds_io": ["--folder", tmp_path, "--loops", "1000000"],
        "ds_nvme_tune": ["--nvme_dir", tmp_path, "--seconds", "1000"],
    }[name]
    with start(name, *endless, "--io_size", "1M") as process:
        until = time.monotonic() + 60
        while not _holds_a_file(process.pid, tmp_path):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.02)
        process.send_signal(ending)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def _holds_a_file(pid: int, folder: Path) -> bool:
    try:
        links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return sum(link.startswith(str(folder)) for link in links) == 3  # twice for the engine, once for the loop


@pytest.mark.exhaustive  # the commands of one of them in make test: test_report.py
def test_commands_of_a_source_tree(tmp_path: Path) -> None:
    runs = [
        start("ds_io", "--folder", tmp_path, *SMALL),
        start("ds_bench", "io", "--folder", tmp_path, *SMALL, "--read"),
        start("ds_nvme_tune", "--nvme_dir", tmp_path, *TUNE_SMALL),
        start("ds_io", "--folder", tmp_path / "none"),
    ]
    outputs = [run.communicate(timeout=100) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0, 2], outputs
    assert outputs[3][1] == f"ds_io: the folder {tmp_path}/none does not exist; name one on the drive to be measured\n"


def test_tune_prints_a_block_that_a_configuration_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = small_sweep(tmp_path)
    output = tmp_path / "aio.json"
    assert (
        cli.ds_nvme_tune(["--nvme_dir", str(tmp_path), *TUNE_SMALL, "--sweep_config", sweep, "--output", str(output)])
        == 0
    )
    text = capsys.readouterr().out
    table, _, block = text.partition("\n\n")
    assert len(table.splitlines()) == 3 and table.count("best") == 1
    assert json.loads(block) == json.loads(output.read_text())
    config = load_config({"train_batch_size": 1, **json.loads(block)}, world_size=1)
    assert (
        config.aio.block_size in (16 * KIB, 64 * KIB)
        and config.aio.queue_depth == 4
        and config.aio.intra_op_parallelism == 1
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aio.json", "sweep.json"]
    assert output.stat().st_mode & 0o777 == 0o644


def test_tune_measures_what_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--nvme_dir", str(tmp_path), *TUNE_SMALL, "--sweep_config", small_sweep(tmp_path), "--json"]
    assert cli.ds_nvme_tune([*common, "--no_write", "--loops", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(trial["read"]) for trial in found["trials"]] == [3, 3]
    assert not any("write" in trial for trial in found["trials"])
    assert cli.ds_nvme_tune([*common, "--seconds", "0.3"]) == 0
    found = json.loads(capsys.readouterr().out)
    counts = [len(trial[name]) for trial in found["trials"] for name in ("write", "read")]
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1


CONFIG = """{
  "train_batch_size" : 8,   "zero_optimization": {"stage": 3,
\t"offload_param": {"device": "nvme"} },
  "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.90, 9.5E-1]}}%s
}
"""


def test_tune_changes_only_the_block_of_a_configuration(tmp_path: Path) -> None:
    path, link = tmp_path / "config.json", tmp_path / "link.json"
    path.write_text(CONFIG % "")
    path.chmod(0o640)
    link.symlink_to(path)
    assert cli.ds_nvme_tune(["--nvme_dir", str(tmp_path), *TUNE_SMALL, "--config", str(link)]) == 0
    text = path.read_text()
    (line,) = re.findall(r'  "aio": .*,\n', text)
    assert text.replace(line, "") == CONFIG % "" and json.loads(text)["aio"] == json.loads(f"{{{line[:-2]}}}")["aio"]
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.json", "link.json"]


def test_a_block_that_is_there_keeps_its_other_keys() -> None:
    before = CONFIG % ', "aio": {"queue_depth": 1, "use_gds": false}, "wall_clock_breakdown": true'
    after = with_block(before, Trial(Load(queue_depth=16), {}).block)
    assert json.loads(after)["aio"] == {**Trial(Load(queue_depth=16), {}).block, "use_gds": False}
    begin, end = before.index('{"queue_depth"'), before.index(', "wall')
    assert after[:begin] == before[:begin] and after.endswith(before[end:])
    assert with_block(after, Trial(Load(queue_depth=16), {}).block) == after


@for_each(
    "before",
    [
        "{}",
        "{ }",
        "{\n}",
        '{"a": 1}',
        '{"a":{"aio": [1,\n "}"]}}',
        '{\r\n  "a": 1\r\n}',
        '{"b": "\\"aio\\": {}", "c": {"aio": {}}, "aio" : {"d": 1}}',
    ],
)
def test_odd_configurations_keep_their_text(before: str) -> None:
    block = Trial(Load(), {}).block
    after = with_block(before, block)
    tree = json.loads(before)
    assert json.loads(after) == {**tree, "aio": {**tree.get("aio", {}), **block}}
    assert after.count("\r\n") in (0, after.count("\n"))


@pytest.mark.parametrize(
    "text", ['{"a": 1 // why\n}', "[1]", '{"aio": 3}', "", '{"a": 1,}', '{"\\u0061io": {}}', '{"a": \xff}']
)
def test_a_file_that_cannot_be_changed_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    assert cli.ds_nvme_tune(["--nvme_dir", str(tmp_path), "--config", str(path)]) == 2  # at once, not after a minute
    assert "by hand" in capsys.readouterr().err
    assert path.read_bytes() == text.encode("latin-1")


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tune.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        tune._replace(path, "other")
    assert path.read_text() == "{}" and [each.name for each in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--no_read", "--no_write"], "nothing to measure"),
        (["--seconds", "1e9"], "--seconds is 0 to"),
        (["--io_size", "1000"], "multiple of 4096"),
        (["--sweep_config", "{}/none"], "none cannot be read"),
        (["--sweep_config", "{}/bad"], "block_size: a block is a multiple"),
        (["--sweep_config", "{}/odd"], "depth: [1] is none"),
        (["--config", "{}/none"], "none cannot be read"),
        (["--output", "{}/none/aio.json"], "cannot be written"),
    ],
)
def test_tune_faults_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    (tmp_path / "bad").write_text('{"block_size": [1000]}')
    (tmp_path / "odd").write_text('{"depth": [1]}')
    assert cli.ds_nvme_tune(["--nvme_dir", str(tmp_path), *(each.format(tmp_path) for each in options)]) == 2
    assert said in capsys.readouterr().err


def test_the_best_is_the_cheapest_of_the_good() -> None:
    def trial(block: int, depth: int, write: list[float], read: list[float]) -> Trial:
        return Trial(Load(block, depth), {"write": write, "read": read})

    fast, slow = trial(MIB, 128, [2.0], [3.0]), trial(MIB, 1, [1.9], [2.9])
    nearly = trial(MIB, 32, [1.0, 1.97, 9.0], [3.0])
    assert best_of([fast, nearly, slow]) is nearly
    one_sided = trial(4096, 1, [1.0], [5.0])  # a fast read does not make up for a slow write
    assert best_of([one_sided, fast]) is fast


def test_the_file_is_no_larger_than_the_time_allows() -> None:
    assert tune.affordable(400 * MIB, measured_gbps=10.0, seconds=60, passes=18) == 400 * MIB
    assert tune.affordable(400 * MIB, measured_gbps=1.0, seconds=2, passes=18) == 55_554_048
    assert tune.affordable(400 * MIB, measured_gbps=0.01, seconds=1, passes=18) == tune.LEAST_BYTES
    assert tune.affordable(64 * KIB, measured_gbps=0.01, seconds=0, passes=18) == 64 * KIB


def test_sweep_files(tmp_path: Path) -> None:
    sweep = tune.read_sweep(small_sweep(tmp_path))
    assert sweep == {**SWEEP, "block_size": (16 * KIB, 64 * KIB), "queue_depth": (4,)}
    (tmp_path / "list").write_text("[1]")
    with pytest.raises(UsageError, match="list"):
        tune.read_sweep(str(tmp_path / "list"))
