"""ds_report: true values, doubts with a reason and a remedy, no traceback whatever is broken, and quick."""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepspeed.accelerator.native import compiler
from deepspeed.accelerator.native.builders import ALL_OPS
from deepspeed.monitor import hostmem
from deepspeed.tools.report import cli, probes
from deepspeed.tools.report.cli import Report, doubts, gather
from deepspeed.tools.report.probes import Row, size
from tests.budget.source import ROOT
from tests.harness.patience import too_long
from tests.harness.rows import for_each

CPUINFO = "".join(
    f"processor : {core}\nmodel name\t: Fast 9000\nphysical id : {core % 2}\nflags : sse2 avx2 fma avx512f amx_bf16\n\n"
    for core in range(4)
)


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _named(rows: Row | list[Row]) -> dict[str, Row]:
    return {row.name: row for row in ([rows] if isinstance(rows, Row) else rows)}


@pytest.fixture(scope="module")
def report() -> Report:
    return cli.collect()


def test_sections_and_versions(report: Report) -> None:
    sections = "versions, platform, device and communication, launch tools, build tools, operators, optional packages"
    assert list(report) == [*sections.split(", "), "environment"]
    versions = _named(report["versions"])
    assert versions["torch"].value.startswith(torch.__version__) and versions["torch"].doubt == ""
    assert str(ROOT / "deepspeed") in versions["deepspeed"].value
    assert "unknown" not in str(report["versions"] + report["platform"])
    for title, section in report.items():
        names = [row.name for row in section]
        assert names and len(set(names)) == len(names), title


def test_required_packages_are_those_of_the_project() -> None:
    listed = re.search(r"\ndependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    assert listed is not None
    requirements = re.findall(r'"([A-Za-z-]+)([^"]*)"', listed.group(1))
    assert {name: (f">={first}" if first else "") for name, (first, _) in probes.REQUIRED.items()} == dict(requirements)


@for_each(
    ("name", "version", "said"),
    [
        ("torch", "2.13.0+cpu", ""),
        ("torch", "2.11.1", ""),
        ("torch", "2.10.0", "too old: at least 2.11"),
        ("torch", "2.15.0+cu132", ""),
        ("torch", "2.16.0.dev20260101", "untried: versions below 2.16"),
        ("torch", "3.0", "untried"),
        ("pydantic", "1.10.2", "too old"),
        ("numpy", "1.26", ""),
    ],
)
def test_version_ranges(name: str, version: str, said: str) -> None:
    doubt = probes.range_doubt(name, version)
    assert said in doubt and bool(said) == bool(doubt)


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    module, reason = probes.load_torch()
    assert module is None and "torch" in reason
    row = probes.torch_rows(module, reason)[0]
    assert row.value.startswith(torch.__version__.split("+")[0])  # the metadata of a wheel may leave the build out
    assert "cannot be imported" in row.value and "reinstall" in row.doubt
    assert cli.collect(operators=False)["device and communication"][0].value.startswith("unknown")


def test_a_broken_torch_is_a_line_and_the_report_goes_on(tmp_path: Path) -> None:
    _tree(tmp_path, {"torch/__init__.py": "raise OSError('libcudart.so.12: cannot open shared object file')\n"})
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.tools.report.cli"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "cannot be imported: OSError: libcudart.so.12" in done.stdout
    assert "Traceback" not in done.stdout and "build tools" in done.stdout


def test_a_failing_probe_is_a_row() -> None:
    def broken() -> Row:
        raise RuntimeError("no\nsuch thing")

    assert gather({"a": broken, "b": lambda: Row("b", "1")}) == [Row("a", "unknown (RuntimeError: no)"), Row("b", "1")]


def test_without_psutil_the_report_goes_on() -> None:
    code = "import sys; sys.modules['psutil'] = None; import deepspeed.tools.report.probes as p; print(p.cpu_rows())"
    assert "vector instructions" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout


def test_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {f"sys/devices/system/node/node{number}/x": "" for number in (0, 1)}
    root = _tree(tmp_path, {"proc/cpuinfo": CPUINFO, **nodes})
    rows = _named(probes.cpu_rows(root))
    assert rows["CPU"].value == "Fast 9000"
    assert rows["vector instructions"] == Row("vector instructions", "avx2 fma avx512f amx_bf16")
    assert rows["sockets, NUMA nodes"].value == "2, 2"
    _tree(tmp_path, {"proc/cpuinfo": CPUINFO.replace("avx2", "")})
    assert "AVX2" in _named(probes.cpu_rows(root))["vector instructions"].doubt
    # a processor that the kernel does not name is named
    monkeypatch.setattr("cpuinfo.get_cpu_info", lambda: {"brand_raw": "Neoverse-V2"})
    _tree(tmp_path, {"proc/cpuinfo": "processor\t: 0\nFeatures\t: asimd sve2\n"})
    rows = _named(probes.cpu_rows(root))
    assert rows["CPU"].value == "Neoverse-V2" and rows["vector instructions"].value == "asimd sve2"


def test_control_groups_of_both_kinds(tmp_path: Path) -> None:
    new = _tree(
        tmp_path / "new",
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": f"{1 << 30}\n",
            "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/a/cpu.max": "max 100000\n",
        },
    )
    assert hostmem.memory_groups(new)[0].limit == 1 << 30 and probes.cpu_quota(new) == 1.5
    assert "time for 1.5" in probes.cores_row(new).value
    assert "killed beyond" in _named(probes.memory_rows(new))["memory limit (control group)"].doubt
    # in a container the path is the host's and the tree begins at the container's own group
    old = _tree(
        tmp_path / "old",
        {
            "proc/self/cgroup": "4:memory:/docker/x\n1:cpu:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 << 30}\n",
        },
    )
    assert hostmem.memory_groups(old)[0].limit == 2 << 30 and probes.cpu_quota(old) is None
    _tree(old, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    none = Row("memory limit (control group)", "none")
    assert _named(probes.memory_rows(old))[none.name] == none


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(memlock: int, files: int, shm: int) -> list[Row]:
        others = {resource.RLIMIT_MEMLOCK: memlock}
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (others.get(kind, files), 0))
        stat = SimpleNamespace(f_frsize=1, f_blocks=shm, f_bavail=shm)
        monkeypatch.setattr(os, "statvfs", lambda path: stat)
        return [*probes.limit_rows(), probes.shm_row(str(tmp_path))]

    locked, files, shm = limits(8 << 20, 1024, 64 << 20)
    assert "ulimit -l unlimited" in locked.doubt and "ulimit -n" in files.doubt
    assert shm.doubt.startswith("DataLoader workers")
    fine = limits(-1, 65536, 8 << 30)
    assert [row.doubt for row in fine] == ["", "", ""] and fine[2].value == "8.0 GiB, free 8.0 GiB"
    assert [size(n) for n in (0, 2048, 64 << 20, 3 << 40)] == ["0 B", "2 KiB", "64 MiB", "3072.0 GiB"]


def _fake_torch(*, devices_seen: int, cuda: str | None = "12.8", says: str = "") -> SimpleNamespace:
    def current(check_available: bool = False) -> SimpleNamespace | None:
        if says:
            warnings.warn(says, UserWarning, stacklevel=1)
        return SimpleNamespace(type="cuda") if devices_seen else None

    properties = SimpleNamespace(name="H200", total_memory=140 << 30, major=9, minor=0)
    nccl = SimpleNamespace(version=lambda: (2, 27, 3))
    module = SimpleNamespace(get_device_properties=lambda _index: properties, nccl=nccl)
    return SimpleNamespace(
        accelerator=SimpleNamespace(current_accelerator=current, device_count=lambda: devices_seen),
        get_device_module=lambda _kind: module,
        version=SimpleNamespace(cuda=cuda, hip=None),
    )


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with_two = _named(probes.device_rows(_fake_torch(devices_seen=2)))
    assert with_two["accelerator"].value == "cuda, 2 visible"
    assert with_two["cuda:1"].value == "H200, 140.0 GiB, compute capability 9.0"
    assert probes.nccl_row(_fake_torch(devices_seen=2)).value == "2.27.3" and "gloo" in probes.backends_row().value
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    none = probes.device_rows(_fake_torch(devices_seen=0, says="The NVIDIA driver is too old"))[0]
    assert none.value.startswith("none: ranks run on the CPU")
    assert "CUDA 12.8" in none.doubt and "driver is too old" in none.doubt and "CUDA_VISIBLE_DEVICES=''" in none.doubt
    monkeypatch.setattr(probes, "_DEVICE_FILES", {})
    assert probes.device_rows(_fake_torch(devices_seen=0, cuda=None))[0].doubt == ""
    monkeypatch.setattr(probes, "_DEVICE_FILES", {"/dev/null": "NVIDIA"})
    assert "CPU build" in probes.device_rows(_fake_torch(devices_seen=0, cuda=None))[0].doubt


def test_operators_say_what_runs_instead() -> None:
    rows = _named(probes.operator_rows())
    assert set(rows) == set(ALL_OPS)
    assert rows["gds"].value.startswith("fallback: async_io") and "does not have it" in rows["gds"].value


def test_build_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tree(tmp_path, {"bin/nvcc": "#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n"})
    (tmp_path / "bin/nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    row = probes.cuda_rows("12.8")[1]
    assert row.value.startswith("11.8, ") and "does not fit torch, built for CUDA 12.8" in row.doubt
    assert probes.cuda_rows("11.6")[1].doubt == ""
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(compiler, "NVCC_FOLDERS", ())
    assert probes.cuda_rows(None)[1].value.startswith("none") and probes.compiler_row().doubt
    monkeypatch.setattr(compiler, "find_ninja", lambda: None)
    assert "side by side" in probes.ninja_row().doubt
    assert all("not on PATH" in row.value for row in cli.collect(operators=False)["launch tools"])


def test_variables_are_chosen_and_secrets_hidden() -> None:
    env = {"NCCL_DEBUG": "INFO", "DS_API_KEY": "abc", "DS_HUB": "https://me:pw@host/x", "RANK": "0"}
    env |= {"HOME": "/root", "HF_TOKEN": "t"}
    assert probes.variable_rows(env)[1:] == [
        Row("DS_API_KEY", "(hidden)"),
        Row("DS_HUB", "https://(hidden)@host/x"),
        Row("NCCL_DEBUG", "INFO"),
        Row("RANK", "0"),
    ]


def test_identity_and_threads() -> None:
    assert probes.identity_row({}).value == "alone (rank 0 of 1)"
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "9"}
    assert probes.identity_row(launched).value == "rank 1 of 2, local rank 1, meeting at n0:9"
    assert probes.identity_row({"RANK": "x", "WORLD_SIZE": "2"}).doubt.startswith("The environment variable RANK='x'")
    assert "cores / ranks" in probes.variable_rows({"RANK": "0"})[0].doubt
    assert not probes.variable_rows({})[0].doubt, "the launcher sets it"
    assert probes.variable_rows({"OMP_NUM_THREADS": "1"}) == [Row("OMP_NUM_THREADS", "1")]


def test_text_is_aligned_and_narrow() -> None:
    report = {"one": [Row("a", "word " * 60), Row("longer", "2", "It matters. " * 20)]}
    text = cli.as_text(report)
    lines = text.splitlines()
    assert max(map(len, lines)) <= cli.WIDTH
    assert lines[2].startswith("a       word") and lines[3].startswith("        word")
    path = "/cache/" + "x" * 120
    assert path in cli.as_text({"operators": [Row("a", f"built: {path}")]})
    assert "missing or doubtful" in text and "  longer: It matters." in text
    assert "missing or doubtful" not in cli.as_text(report, verdict=False)
    assert cli.as_text({"t": [Row("a", "b")]}).endswith("  nothing\n")
    assert cli.as_text({"t": [Row("a", "caf\xe9")]}, verdict=False).isascii()


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--hide_operator_status", "--hide_errors_and_warnings"]) == 0
    text = capsys.readouterr().out
    assert "cpu_adam" not in text and cli.VERDICT not in text


def test_json_has_the_same_content(capsys: pytest.CaptureFixture[str], report: Report) -> None:
    assert cli.main(["--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert list(content) == [*report, cli.VERDICT]
    assert content["versions"]["numpy"] == _named(report["versions"])["numpy"].value
    assert content[cli.VERDICT] == doubts(report)


@pytest.mark.exhaustive  # what all commands do with such an output, test_ds_config.py shows
def test_an_output_that_takes_nothing_is_a_sentence() -> None:
    code = "import sys; from deepspeed.tools.report.cli import main; sys.exit(main(['--hide_operator_status']))"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, timeout=60, text=True)
    assert done.returncode == 2 and done.stderr.startswith("ds_report: ") and "Traceback" not in done.stderr
    closed = f"exec {sys.executable} -c {shlex.quote(code)} >&-"
    done = subprocess.run(["sh", "-c", closed], stderr=subprocess.PIPE, timeout=60, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_takes_less_than_five_seconds() -> None:
    start = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, ROOT / "bin" / "dsr"], env=env, capture_output=True, timeout=60)
    late = too_long(start, 5)
    assert done.returncode == 0 and done.stderr == b""
    assert not late


def test_every_monitor_that_is_there_has_its_package_in_the_report() -> None:
    for name in ("tensorboard", "wandb", "comet_ml"):
        assert "metrics" in probes.OPTIONAL[name] and "not in this release" not in probes.OPTIONAL[name]
