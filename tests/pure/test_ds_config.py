"""``ds_config``: every fault at once, every value explained, every starting file valid, and no traceback."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings as fuzzing

from deepspeed.config.explain.check import FILLED_BY_INTEGRATIONS
from deepspeed.config.model.root import DeepSpeedConfig, load_config
from deepspeed.config.model.settings import all_keys, written_paths
from deepspeed.monitor.log import logger
from deepspeed.tools.config import cli
from deepspeed.tools.config.cli import STARTERS, main
from tests.pure.test_client_configs import ACCEPTED, HF_ZERO2, HF_ZERO3, PLAIN
from tests.pure.test_config_fuzz import RELAXED, documents

ROOT = Path(__file__).parents[2]
KEYS = all_keys(DeepSpeedConfig)
FACTS = json.loads((ROOT / "tests" / "data" / "config_keys.json").read_text())

MANY = """\
{
  // one line each
  "train_batch_size": 33,
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "gradient_clipp1ng": 1.0,
  "fp16": {"enabled": true, "loss_scal": 0},
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": "three",
    "reduce_bucket_size": -4,
    "offload_param": {"device": "cpu"},
    "zero_quantized_weights": true
  },
  "amp": {"enabled": true}
}
"""


GOALS = ("finetune", "lora", "offload", "pretrain")


def starter(goal: str) -> str:
    return (STARTERS / f"{goal}.json").read_text()


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        status = main(list(args))
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return status, out, err


def written(tmp_path: Path, content: object, name: str = "c.json") -> str:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return str(path)


# --- check ---


def test_all_faults_at_once_with_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, MANY)
    status, out, err = run(capsys, "check", path)
    assert (status, out) == (2, "")
    found = err.splitlines()
    assert all(line.startswith(f"{path}: ") for line in found)
    for words, line in (
        ("gradient_clipp1ng: unknown key, did you mean 'gradient_clipping'?", 6),
        ("fp16.loss_scal: unknown key, did you mean 'loss_scale'?", 7),
        ("zero_optimization.stage must be a whole number, not 'three'", 10),
        ("zero_optimization.reduce_bucket_size must be greater than or equal to 1", 11),
        ("amp was removed", 15),
        ("fp16.enabled and bf16.enabled are both true", 7),
        ("train_batch_size is not equal", 3),
        ("zero_optimization.zero_quantized_weights", 13),
    ):
        assert [item for item in found if words in item and f"(line {line})" in item], (words, err)
    assert "offload_param needs stage 3" not in err, "a consequence of the stage that could not be read"
    assert len(found) == len(set(found)) == 8


def test_a_misspelt_size_is_one_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "check", written(tmp_path, {"train_batch_sizes": 8}))
    assert len(err.splitlines()) == 1 and "did you mean 'train_batch_size'" in err


def test_ok_and_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9, "contiguous_gradients": True},
        "fp16": {"enabled": False, "loss_scale": 128},
        "$schema": "x",
    }
    path = written(tmp_path, content)
    status, out, err = run(capsys, "check", path, "--world", "4")
    assert (status, err) == (0, "")
    first, *notes = out.splitlines()
    assert first == f"{path}: ok (6 keys, ZeRO stage 2, fp32, batch 8 = 2 x 1 x 4)"
    assert any(
        "max_live_parameters has no effect: stage 2 does not shard parameters (line 5)" in note for note in notes
    )
    assert any("fp16.loss_scale has no effect: fp16.enabled is false" in note for note in notes)


def test_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locked = written(tmp_path, {"train_batch_size": 1}, "locked.json")
    os.chmod(locked, 0)
    cases = [("", "no such file"), (str(tmp_path / "gone.json"), "no such file"), (str(tmp_path), "is a directory")]
    cases += [(locked, "cannot be read")] if os.geteuid() else []
    for name, words in cases:
        status, out, err = run(capsys, "check", name)
        assert (status, out, len(err.splitlines())) == (2, "", 1) and words in err


def test_several_files_and_the_worst_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = written(tmp_path, {"train_batch_size": 1}, "good.json"), written(tmp_path, {"x": 1}, "bad.json")
    status, out, err = run(capsys, "check", good, bad, good)
    assert status == 2 and out.count("good.json: ok") == 2 and "bad.json: x: unknown key" in err


def test_auto_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (HF_ZERO2, HF_ZERO3, json.loads((ROOT / "examples" / "configs" / "hf_auto.json").read_text())):
        path = written(tmp_path, content)
        status, out, err = run(capsys, "check", path, "--world", "2")
        autos = [item for item, value in written_paths(content) if value == "auto"]
        assert (status, err) == (0, "") and f'{len(autos)} values are "auto"' in out and "batch sizes open" in out
        assert all(item in out for item in autos)
        status, out, err = run(capsys, "check", path, "--resolved")
        assert status == 2 and out == "" and len(err.splitlines()) == len(autos)
        assert all(f'{item} is still "auto"' in err for item in autos)


def test_the_list_of_filled_keys_is_the_documented_one() -> None:
    assert {entry["path"] for entry in FACTS if entry["auto_ok"]} == FILLED_BY_INTEGRATIONS


def test_the_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    path = written(tmp_path, sizes)
    status, _, err = run(capsys, "check", path)
    assert status == 2 and "give the number of ranks with --world N" in err
    assert run(capsys, "check", path, "--world", "4")[0] == 0


@pytest.mark.parametrize("name", PLAIN)
def test_what_clients_write_passes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, ACCEPTED[name])
    assert run(capsys, "check", path, "--world", "2")[0] == 0
    assert run(capsys, "show", path, "--world", "2", "--all")[0] == 0


def test_check_leaves_the_logger_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(logger.handlers)
    status, out, _ = run(capsys, "check", written(tmp_path, {"train_batch_size": 1, "allgather_size": 5}))
    assert status == 0 and "note: allgather_size is deprecated" in out
    assert logger.handlers == before


def test_a_block_inside_one_that_is_off_is_one_note_per_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"train_batch_size": 1, "autotuning": {"enabled": False, "model_info": {"num_layers": 2}}}
    _, out, _ = run(capsys, "check", written(tmp_path, content))
    (note,) = [line for line in out.splitlines() if "note:" in line]
    assert "autotuning.model_info.num_layers has no effect: autotuning.enabled is false" in note


def test_check_says_which_keys_of_a_pipeline_block_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = {"stages": 2, "schedule": "gpipe", "mine": 3, "grad_partitioned": False}
    status, out, _ = run(capsys, "check", written(tmp_path, {"train_batch_size": 1, "pipeline": block}))
    assert status == 0 and [f"pipeline.{name} has no effect" in out for name in block] == [False, False, True, True]


# --- show ---


def test_show_names_each_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "contiguous_gradients": False},
        "bf16": {"enabled": True},
    }
    status, out, err = run(capsys, "show", written(tmp_path, content), "--world", "2")
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ") and len(line.split()) > 2}
    assert "line 2" in rows["train_batch_size"]
    assert rows["train_micro_batch_size_per_gpu"].split()[1:] == ["derived", "4"]
    assert rows["gradient_accumulation_steps"].split()[1:] == ["derived", "1"]
    assert rows["reduce_bucket_size"].split()[1:3] == ["auto", "500000000"]
    assert rows["steps_per_print"].split()[1:] == ["default", "null"] and "default" in rows["gradient_clipping"]
    lines = out.replace(str(tmp_path), "").splitlines()
    assert all("note:" in line for line in lines if len(line) > 120)


def test_show_marks_what_has_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inert = "zero_optimization.contiguous_gradients"
    _, out, _ = run(capsys, "show", written(tmp_path, {"train_batch_size": 8}), "--all")
    (line,) = [line for line in out.splitlines() if line.split()[:1] == [inert.partition(".")[2]]]
    assert "inert here" in line
    _, out, _ = run(capsys, "show", written(tmp_path, {"train_batch_size": 8}), "--all", "--json")
    rows = {row["path"]: row for row in json.loads(out)["settings"]}
    assert rows[inert]["class"] == "inert here"
    assert rows["fp16.loss_scale"]["without_effect"] == "off: fp16.enabled is false"
    for path, key in KEYS.items():
        assert path not in rows or rows[path]["class"] == key.support.value
    assert rows["train_batch_size"]["origin"] == "file" and rows["train_batch_size"]["line"] == 2


def test_show_refuses_a_faulty_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "show", written(tmp_path, MANY))
    assert status == 2 and out == "" and len(err.splitlines()) == 8


QUANTITIES = ("parameters", "gradients (autograd)", "accumulation", "reduction (wire)", "master weights")
QUANTITIES += ("optimizer states", "buffers")
MODEL, PARAMETER = "as the model", "as the parameter"
EVERY_KEY = {
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "bf16", "buffer_dtype": "float32"},
}
DTYPES: dict[str, tuple[dict[str, object], list[str]]] = {
    "plain": ({}, [MODEL, PARAMETER, "fp32", PARAMETER, "fp32; the parameters", "fp32", MODEL]),
    "bf16": ({"bf16": {"enabled": True}}, ["bf16", "bf16", "fp32", "bf16", "fp32", "fp32", MODEL]),
    "fp16": ({"fp16": {"enabled": True}}, ["fp16", "fp16", "fp32", "fp16", "fp32", "fp32", MODEL]),
    "every key": (EVERY_KEY, ["bf16", "bf16", "bf16", "fp32", "fp32", "fp32", "fp32"]),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_table(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It comes with the keys."""
    content, expected = DTYPES[name]
    status, out, _ = run(capsys, "show", written(tmp_path, {"train_batch_size": 1, **content}), "--dtypes")
    assert status == 0 and "train_batch_size" in out
    for quantity, dtype in zip(QUANTITIES, expected, strict=True):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{quantity}  ")]
        assert line[len(quantity) :].strip().startswith(dtype), line


def test_modules_that_autocast_lists_are_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = {"enabled": True, "dtype": "fp16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    _, out, _ = run(capsys, "show", written(tmp_path, {"train_batch_size": 1, "torch_autocast": block}), "--dtypes")
    assert "fp16, gradients and wire too: torch.nn.Linear" in out and "autocast to fp16" in out
    _, out, _ = run(capsys, "show", written(tmp_path, {"train_batch_size": 1, "bf16": {"enabled": True}}), "--dtypes")
    row = next(line for line in out.splitlines() if line.startswith("forward arithmetic"))
    assert row.split() == ["forward", "arithmetic", "bf16", "follow", "the", "parameters"]


def test_the_policy_is_what_the_table_says() -> None:
    policy = load_config({"train_batch_size": 1, **EVERY_KEY}, world_size=1).dtype_policy
    assert tuple(policy) == ("bf16", "bf16", "bf16", "fp32", "fp32", "fp32")
    plain = load_config({"train_batch_size": 1}, world_size=1).dtype_policy
    assert tuple(plain) == (None, "bf16", "fp32", None, "fp32", None)


# --- init ---


def test_every_goal_is_tried() -> None:
    assert {path.name for path in STARTERS.iterdir()} == {f"{goal}.json" for goal in GOALS}


@pytest.mark.parametrize("goal", GOALS)
def test_starting_files(goal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "ds.json")
    status, out, _ = run(capsys, "init", "--goal", goal, "-o", path)
    assert (status, out) == (0, f"wrote {path}; next: ds_config check {path} --world RANKS\n")
    assert Path(path).read_text() == starter(goal) == run(capsys, "init", "--goal", goal)[1]
    for world in ("1", "8"):
        status, out, err = run(capsys, "check", path, "--world", world, "--resolved")
        assert (status, err) == (0, "") and "note:" not in out
    assert starter(goal).count("//") >= 8 and max(map(len, starter(goal).splitlines())) <= 120


def test_init_replaces_nothing_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "mine")
    status, out, err = run(capsys, "init", "-o", path)
    assert (status, out) == (2, "") and "--force" in err and Path(path).read_text() == "mine"
    assert run(capsys, "init", "-o", path, "--force")[0] == 0 and Path(path).read_text() == starter("finetune")
    status, _, err = run(capsys, "init", "-o", str(tmp_path / "no" / "where.json"))
    assert status == 2 and "No such file" in err and "where.json" in err


def test_the_offload_goal_offloads(tmp_path: Path) -> None:
    zero = load_config(written(tmp_path, starter("offload")), world_size=1).zero
    assert zero.offload_optimizer is not None and zero.offload_param is not None
    assert zero.offload_optimizer.device.value == zero.offload_param.device.value == "cpu"


# --- as a program ---


NO_TORCH = """
import sys
from deepspeed.tools.config.cli import main
status = main(["check", "-"])
assert "torch" not in sys.modules
sys.exit(status)
"""


def _check(stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", NO_TORCH]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, cwd=ROOT)


def test_standard_input_and_no_torch() -> None:
    done = _check(json.dumps(HF_ZERO3).encode())
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.startswith(b"-: ok (")
    for bad, words in ((b"\xff\x00", b"not a text"), (b'{"a": 1}', b"a: unknown key")):
        done = _check(bad)
        assert done.returncode == 2 and words in done.stderr and b"Traceback" not in done.stderr


def _processor_seconds(*command: str) -> float:
    """Of the quickest of three runs; processor time, because other programs may keep this one waiting."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, timeout=60, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_check_takes_half_a_second_at_most() -> None:
    """On a slow or shared processor: six times what importing pydantic takes there, where torch takes fifteen times."""
    check = _processor_seconds("-m", "deepspeed.tools.config.cli", "check", "examples/configs/hf_auto.json")
    quick = check - _processor_seconds("-c", "pass") < 0.5
    assert quick or check < 6 * _processor_seconds("-c", "import pydantic.main")


@pytest.mark.parametrize(("stream", "content"), [("stdout", {"train_batch_size": 1}), ("stderr", {"x": 1})])
def test_a_reader_that_leaves_is_no_traceback(stream: str, content: dict, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(ROOT / "bin" / "ds_config"), "show", path, "--all"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writing}
    done = subprocess.run(command, **pipes, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})
    os.close(writing)
    assert not done.stderr and not done.stdout and done.returncode == 141


def test_closed_streams(tmp_path: Path) -> None:
    path = written(tmp_path, {"train_batch_size": 1})
    for redirect in (">&-", "2>&- >&-"):
        command = f"{sys.executable} -m deepspeed.tools.config.cli check {path} {redirect}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, b"")


def test_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "examine", interrupt)
    assert run(capsys, "check", written(tmp_path, {}))[:2] == (130, "")


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.json"
    Path(os.fsdecode(path)).write_text('{"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}}}')
    command, env = [sys.executable, "-m", cli.__name__, "show", path], {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=60, cwd=ROOT, env=env)
    assert done.returncode == 0 and done.stderr == b""


# --- anything goes in ---


@fuzzing(RELAXED, max_examples=60)
@given(document=documents())
def test_no_document_is_a_traceback(
    document: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, document)
    status, out, err = run(capsys, "check", path, "--world", "2")
    assert (status == 0 and err == "" and out) or (status == 2 and err and out == "")
    assert run(capsys, "show", path, "--world", "2")[0] == status
