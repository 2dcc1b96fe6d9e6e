"""benchmarks/gpu.py without a GPU: its plan fits the time a command has, its tables hold what was and was not measured,
its figures of waits and overlap are read right, and it trains tiny models on the CPU.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.config import load_config
from tests.harness.warm import Warm

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    gpu, table = importlib.import_module("gpu"), importlib.import_module("gpu_cases")
    watch, predicted = importlib.import_module("gpu_watch"), importlib.import_module("gpu_predicted")


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They import each other, and what they measure, when they are asked for it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_every_command_is_expected_to_fit_and_together_they_run_every_case() -> None:
    run: list[str] = []
    for parts, cases in table.COMMANDS.values():
        rows = table.plan(parts.split(), list(cases), table.read(table.PREDICTED))
        minutes = gpu.parse([]).minutes  # what it stops after
        seconds = sum(row[-1] for row in rows)
        assert seconds <= 60 * minutes < table.COMMAND_S, table.plan_text(rows, table.COMMAND_S)
        run += [name for _, name, _ in rows if name]
    assert sorted(run) == sorted(table.CASES)
    assert {part for parts, _ in table.COMMANDS.values() for part in parts.split()} == set(table.PARTS)


def test_what_can_be_simulated_has_been() -> None:
    machines = table.read(table.PREDICTED)["machines"]
    expected = sorted(name for name, case in table.CASES.items() if case.simulated)
    assert {name: sorted(rows) for name, rows in machines.items()} == {"h100": expected, "h200": expected}
    assert all(row["step_s"] > 0 and row["peak_device_gib"] > 0 for rows in machines.values() for row in rows.values())


def test_a_plan_that_takes_too_long_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = ["--plan", "--parts", *table.PARTS]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *every])
    assert gpu.show_plan(gpu.parse(every)) == 1 and "DOES NOT FIT" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--plan"])
    assert gpu.show_plan(gpu.parse(["--plan"])) == 0
    assert capsys.readouterr().out.count("fits into 600 s") == 3


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    args = gpu.parse(["--command", "2"])
    assert (args.parts, args.cases) == (["train"], list(table.MORE))
    dry = gpu.parse(["--dry"])
    assert (dry.parts, dry.on, dry.quick) == (["kernels", "checks", "train"], "cpu", True)
    with pytest.raises(SystemExit):
        gpu.parse(["--command", "1", "--cases", "zero3"])
    assert "leave --parts and --cases out" in capsys.readouterr().err


def test_configurations_are_taken() -> None:
    for name in ("zero3_gas4", "nvme", "cpu"):
        parsed = load_config(table.config(table.CASES[name], "/drive", 8, 1 << 33), world_size=1)
        assert parsed.gradient_accumulation_steps == table.CASES[name].accumulation
        assert parsed.zero.stage == 3 and (name != "nvme" or parsed.zero.offload_param.nvme_path == "/drive")


def test_the_kernels_part_runs_with_its_own_arguments() -> None:
    found = gpu.kernels(gpu.parse(["--case", "kernels", "--on", "cpu", "--numel", f"{1 << 20}", "--rounds", "1"]))
    assert found["elements"] == 1 << 20 and not found["native_kernel"]
    assert all(found[f"{name}_gbs"] > 0 for name in ("copy", "ours", "torch"))
    assert "| FusedAdam |" in gpu.kernel_table(found)


def test_waits_for_events_count_where_the_event_had_not_come() -> None:

    class Event:
        waited = 0

        def __init__(self, *, come: bool) -> None:
            self.come = come

        def query(self) -> bool:
            return self.come

        def synchronize(self) -> None:
            Event.waited += 1

    def step() -> None:
        Event(come=True).synchronize()
        Event(come=False).synchronize()

    before = Event.synchronize
    ((file, line, text),) = watch.waits_for_events(step, Event)
    assert file == __file__ and line == step.__code__.co_firstlineno + 2
    assert Event.synchronize is before and Event.waited == 2
    assert watch.waits_of([(file, line, text)])["waits_per_step"] == 1


def test_overlap_and_waits_are_read_from_what_torch_says() -> None:

    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        *(event("kernel", "gemm", ts, 100.0) for ts in (0.0, 100.0)),
        event("gpu_memcpy", "Memcpy DtoH", 50.0, 100.0),  # beside the kernels
        event("gpu_memcpy", "Memcpy HtoD", 300.0, 100.0),  # alone
        event("gpu_memcpy", "Memcpy DtoD", 200.0, 10.0),
        event("kernel", "ncclDevKernel_AllGather", 150.0, 100.0),  # half beside
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0},
    ]
    found = watch.overlap_of(events, steps=2)
    assert found == {
        "kernels_per_step": 1, "gpu_busy": 0.875, "copies_ms": 0.1, "copies_hidden": 0.5, "collectives_ms": 0.05,
        "collectives_hidden": 0.5,
    }  # fmt: skip
    assert watch.overlap_of([], steps=2) == {"kernels_per_step": 0}
    inside = f"{BENCHMARKS.parent}/deepspeed/zero/step.py"
    warned = [(inside, 7, "called a synchronizing CUDA operation")] * 2 + [(inside, 9, "deprecated")]
    assert watch.waits_of(warned) == {"waits_per_step": 2, "waits": [("deepspeed/zero/step.py:7", 2)]}


def test_the_table_has_empty_cells_for_what_was_not_measured(tmp_path: Path) -> None:
    facts = {"machines": {"h100": {"zero3": {"step_s": 0.1334, "tflops": 347.1, "waits_per_step": 1}}}}
    text = predicted.markdown(facts, {})
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "**no device yet**" in text and len(rows) == len(table.CASES) + 1
    assert rows["ZeRO-3"] == "| ZeRO-3 | 133 | 347.1 |  | 1 |  |  |  |  |  |  |"
    measured = {"machine": {"device": "a GPU"}, "date": "2027-01-01", "cases": {"fsdp2": {"step_s": 0.2}}}
    measured["cases"] |= {"torch": {"failed": "stopped after 60 s"}}
    text = predicted.markdown(facts, measured)
    assert "**a GPU** on 2027-01-01" in text and "| FSDP2 |  |  |  |  |  | 200 |  |  |  |  |" in text
    assert "| plain PyTorch AdamW |  |  |  |  |  | stopped after 60 s |  |  |  |  |" in text
    docs = tmp_path / "docs.md"
    docs.write_text(f"a\n{predicted.BEGIN}old\n{predicted.END}b\n")
    predicted.write_docs("new\n", docs)
    assert docs.read_text() == f"a\n{predicted.BEGIN}new\n{predicted.END}b\n"


def test_the_docs_have_the_table_of_the_files() -> None:
    text = predicted.markdown(table.read(table.PREDICTED), table.read(table.MEASURED))
    assert predicted.BEGIN + text + predicted.END in predicted.DOCS.read_text()


def test_rows_are_added_to_the_file_and_another_device_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    row = {"part": "train", "mode": "zero3", "step_s": 1.0}
    gpu.write_out(path, {"device": "one"}, [row, {"part": "checks", "oom_recovered": True}])
    gpu.write_out(path, {"device": "one"}, [{**row, "mode": "torch"}, {**row, "step_s": 2.0}])
    found = json.loads(path.read_text())
    assert {name: case["step_s"] for name, case in found["cases"].items()} == {"zero3": 2.0, "torch": 1.0}
    assert found["others"]["checks"]["oom_recovered"]
    gpu.write_out(path, {"device": "two"}, [row])
    assert set(json.loads(path.read_text())["cases"]) == {"zero3"} and not json.loads(path.read_text())["others"]


def test_tables_of_the_run() -> None:
    rows = [{"mode": "zero3", "parameters": 5, "step_s": 0.1, "waits_per_step": 1}, {"mode": "nvme", "failed": "no"}]
    text = gpu.train_table(rows)
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1 and "| ZeRO-3 | 0.1 |" in text and "NVMe | no |" in text
    assert "TRAINING DID NOT GO ON" in gpu.checks_text({"oom_raised": "", "oom_recovered": False})


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_a_dry_run_trains_tiny_models_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    cases = ["torch", "fsdp2", "zero3", "zero_offload_gas4", "nvme"]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--dry", "--cases", *cases, "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=480)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text())
    assert found["others"]["checks"] == {"part": "checks", "oom_raised": "OutOfMemoryError", "oom_recovered": True}
    assert list(found["cases"]) == cases and all(row["step_s"] > 0 for row in found["cases"].values())


def test_without_a_device_it_says_so(warm: Warm) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [warm.python, str(BENCHMARKS / "gpu.py"), "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2 and "--plan and --dry need none" in ended.stderr
