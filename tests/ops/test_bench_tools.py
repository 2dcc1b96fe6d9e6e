"""``ds_bench``: its commands measure, say what is wrong, and leave nothing behind."""

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepspeed.errors import BuildError
from deepspeed.monitor import program
from deepspeed.monitor.program import INTERRUPTED
from deepspeed.tools.bench import cli, common, cpu_adam, load
from tests.budget.source import ROOT

SMALL = ["--params", "20K", "--steps", "4", "--every", "2"]


def test_numbers_of_parameters() -> None:
    texts = {"8M": 8 * 10**6, "134m": 134 * 10**6, "1e9": 10**9, "1.5B": 1_500_000_000, "2G": 2 * 10**9}
    texts |= {"10K": 10**4, "7": 7, "1e+3": 1000}
    assert {text: common.params_of(text) for text in texts} == texts
    for text in ("", "0", "-1", "M", "1e99", "nan", "1e-3", "8 M B", "0.1", "\u0663M"):
        with pytest.raises(argparse.ArgumentTypeError, match="write for example"):
            common.params_of(text)


def test_adam_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert cli.main(["cpu-adam", "--params", "50K", "--threads", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["params"], found["threads"], found["unit"], found["bytes_per_element"]) == (50_000, 2, "GB/s", 28)
    assert {"ours", "torch fused"} <= set(found["results"]) <= {"ours", "torch fused", "plain loop"}
    for name, row in found["results"].items():
        assert len(row["all"]) == cpu_adam.ROUNDS and 0 < row["min"] <= row["median"] <= row["max"]
        assert name == "ours" or found["ratio"][name] == pytest.approx(
            found["results"]["ours"]["median"] / row["median"]
        )
    assert torch.get_num_threads() == threads


def test_the_loop_moves_every_element() -> None:
    buffers = [torch.randn(10) for _ in range(4)]
    a, g, m, v = (buffer.clone() for buffer in buffers)
    with ThreadPoolExecutor(3) as pool:
        try:
            cpu_adam.loop(buffers, 3, pool)()
        except BuildError as error:
            pytest.skip(str(error))
    assert [torch.equal(*pair) for pair in zip(buffers, (a + g, g, m + g, v + g), strict=True)] == [True] * 4


def test_adam_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none(op: object) -> None:
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(cpu_adam, "load", none)
    assert cli.main(["cpu-adam", "--params", "5K"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("AdamW on 5,000 fp32 elements") and lines[-1] == "plain loop: left out, no C++ compiler"
    assert [line.split("  ")[0] for line in lines[3:-1]] == ["ours", "torch fused"]


def test_checkpoints_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ckpt", "--folder", str(tmp_path), *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["params"] == pytest.approx(20_000, rel=0.02) and found["background"] is True
    assert (found["ranks"], found["steps"], found["every"]) == (2, 4, 2)
    assert 12 * found["params"] < found["bytes"] < 12 * found["params"] + 100_000
    assert len(found["held_s"]["all"]) == len(found["named_s"]["all"]) == 2
    assert 0 < found["share"] < 1 and found["gb_per_s"] > 0 and found["wall_s"] > sum(found["held_s"]["all"])
    assert found["ratio"] == pytest.approx(found["held_s"]["median"] / found["copy_s"])
    assert not list(tmp_path.iterdir())


def test_checkpoints_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ckpt", "--folder", str(tmp_path), *SMALL, "--ranks", "1", "--sync"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "on 1 ranks" in lines[0] and "2 saves" in lines[1] and lines[1].endswith("while training waits")
    held, named = (line.split() for line in lines[4:6])
    assert held[5:7] == named[6:8]  # a checkpoint that is waited for has its name when the call returns
    assert lines[-1].startswith("saves held training for")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--folder", "{}/none"], "{}/none does not exist"),
        (["--folder", "{}", "--steps", "3"], "--steps 3 are fewer than --every 5"),
        (["--folder", "{}", "--params", "1e13"], "GB of memory and"),
        (["--folder", "{}", "--ranks", "999999999"], "give fewer --params or --ranks"),
    ],
)
def test_faults_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(["ckpt", "--params", "1K", *(each.format(tmp_path) for each in arguments)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ds_bench ckpt: ") and said.format(tmp_path) in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_reading_whole_states_is_measured_beside_one_all_gather(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["access", "--params", "20K", "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert "parameters on 2 ranks, ZeRO-3, bf16, AdamW" in shown and "of one all-gather in fp32" in shown
    names = ["gradients", "fp32 weights", "first moments", "weights gathered", "all-gather", "step"]
    rows = [line.rsplit(maxsplit=2) for line in shown.splitlines()[3:]]
    assert [name for name, _, _ in rows] == names and all(float(seconds) > 0 for _, seconds, _ in rows)
    assert float(rows[4][2]) == 1.0


def test_the_exposed_update_is_what_a_step_takes_beside_its_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["step", "--params", "20K", "--steps", "2", "--offload", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    seconds = facts["seconds"]
    assert facts["exposed"] == max(0.0, seconds["step"] - seconds["forward and backward"]) and seconds["update"] > 0


def test_zero_and_fsdp2_train_the_same_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vs-fsdp2", "--params", "20K", "--steps", "1", "--rounds", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"ZeRO-3", "FSDP2"}
    for each in facts.values():
        assert each["samples_per_s"] == pytest.approx(2 * 256 / each["step_s"]) and each["grew_bytes"] > 0


def test_a_stream_of_weights_is_measured_beside_plain_messages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stream", "--params", "20K", "--steps", "2", "--max-bytes", "8K", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["bytes"] == 2 * facts["params"] and facts["bytes_to_one"] == facts["bytes"] / 2
    assert set(facts["seconds"]) == {"to one rank", "to all ranks", "messages to one rank"}
    least = facts["seconds"]["messages to one rank"]
    assert all(facts["ratio"][name] == pytest.approx(s / least) and s > 0 for name, s in facts["seconds"].items())


def test_generation_is_measured_beside_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--params", "20K", "--steps", "1", "--tokens", "3", "--rows", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "3 tokens of 2 sequences" in shown[0] and "2 ranks, ZeRO-3" in shown[0]
    rows = [line.rsplit(maxsplit=3) for line in shown[3:6]]
    assert [row[0] for row in rows] == ["plain PyTorch", "in unsharded()", "through the engine"]
    assert rows[0][3] == "1.00"
    for _, seconds, rate, _ in rows:
        assert float(rate) > 0 and float(seconds) >= 0


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: argparse.Namespace(free=1000))
    assert cli.main(["ckpt", "--folder", str(tmp_path), *SMALL]) == 2
    assert "two checkpoints take" in capsys.readouterr().err and not list(tmp_path.iterdir())
    monkeypatch.setattr(common, "host_available_bytes", lambda: 1000)
    assert cli.main(["cpu-adam", "--params", "1M"]) == 2
    assert "give fewer --params" in capsys.readouterr().err


def test_a_save_that_fails_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, lost = tempfile.mkdtemp, tmp_path / "file" / "below"
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(
        tempfile, "mkdtemp", lambda *a, **k: str(lost) if "ckpt" in str(k.get("prefix")) else real(*a, **k)
    )
    assert cli.main(["ckpt", "--folder", str(tmp_path), *SMALL]) == 2
    err = capsys.readouterr().err
    assert str(lost) in err and "Traceback" not in err


@pytest.mark.in_make_test("2-130")
@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (signal.SIGINT, INTERRUPTED),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGKILL, -signal.SIGKILL),  # which only the command itself gets, and its folder stays
    ],
)
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, ending: signal.Signals, status: int) -> None:
    endless = ["--params", "20K", "--steps", "1000000", "--every", "1", "--ranks", "1"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "bin" / "ds_bench"), "ckpt", "--folder", str(tmp_path), *endless],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    until = time.monotonic() + 90
    try:
        while not list(tmp_path.glob("ds_bench_ckpt_*/step*")):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.05)
        killed = ending is signal.SIGKILL
        (os.kill if killed else os.killpg)(process.pid, ending)  # the group: as a terminal does
        _, errors = process.communicate(timeout=60)  # the pipe is open for as long as one of its processes lives
        assert process.returncode == status, errors
        assert "Traceback" not in errors and (killed or not list(tmp_path.iterdir()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_reader_that_left_ends_a_command_with_closed_errors_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def left() -> int:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)
    assert program.guarded("ds_io", left) == program.BROKEN_PIPE
    sys.stderr.close()  # the stream that stands for the closed one


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two safetensors files of a model."""
    folder = tmp_path_factory.mktemp("model")
    for number in range(2):
        values = {f"layers.{number}.{name}.weight": torch.randn(256, 256) for name in ("up", "down")}
        save_file(values, folder / f"model-{number}.safetensors")
    return folder


@pytest.mark.parametrize("level", [0, 3])
def test_a_load_is_measured(capsys: pytest.CaptureFixture[str], model_folder: Path, level: int) -> None:
    words = ["load", "--model", str(model_folder), "--ranks", "2", "--zero", str(level), "--json"]
    assert cli.main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    total = 4 * 256 * 256 * 4
    assert facts["part_bytes"] == (total / 2 if level == 3 else total) and facts["largest_bytes"] == total / 4
    assert all(total / 2 <= read <= total / 2 + (1 << 20) for read in facts["read_bytes"]), facts["read_bytes"]
    assert 0 < max(facts["grew_bytes"]) <= facts["bound_bytes"] and facts["seconds"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "{}/none"], "has no *.safetensors files"),
        (["--model", "{}", "--zero", "0", "--transformers"], "leave --zero out"),
        (["--model", "{}", "--max-rss", "much"], "no multiple of a shard"),
    ],
)
def test_a_load_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], model_folder: Path, words: list[str], said: str
) -> None:
    try:
        status = cli.main(["load", *(word.format(model_folder) for word in words)])
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    assert status == 2 and said in capsys.readouterr().err


def test_a_load_above_its_bound_fails(
    capsys: pytest.CaptureFixture[str], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_SLACK_BYTES", -(1 << 40))
    assert cli.main(["load", "--model", str(model_folder)]) == 1
    assert "above the bound by" in capsys.readouterr().err
