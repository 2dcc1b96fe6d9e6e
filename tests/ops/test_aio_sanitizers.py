"""csrc/aio under the address, undefined-behaviour and thread sanitizers: no report on any backend."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deepspeed.accelerator.native.spec import ASYNC_IO
from tests.budget.source import ROOT

GXX = shutil.which("g++") or shutil.which("clang++")
pytestmark = [pytest.mark.skipif(GXX is None, reason="needs a C++ compiler"), pytest.mark.timeout(400)]
FLAGS = ("-std=c++17", "-g1", "-O1", "-pthread", "-fno-sanitize-recover=all")
SANITIZERS = ("address,undefined", "thread")
BACKENDS = {"io_uring": "1", "libaio": "2", "threads": "3"}


def compile_with(sanitizers: str, sources: list[Path], target: Path) -> subprocess.CompletedProcess[str]:
    """Run the compiler."""
    into = ["-I", str(ASYNC_IO.folder()), *map(str, sources), "-o", str(target)]
    command = [str(GXX), *FLAGS, f"-fsanitize={sanitizers}", *into]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def build(sanitizers: str, folder: Path) -> Path | str:
    """The stress program with these sanitizers in it, or why there is none."""
    (folder / "empty.cpp").write_text("int main() { return 0; }\n")
    probe = compile_with(sanitizers, [folder / "empty.cpp"], folder / "empty")
    if probe.returncode != 0 or subprocess.run([folder / "empty"], timeout=60).returncode != 0:
        return f"the runtime of -fsanitize={sanitizers} is not installed or does not run here"
    built = compile_with(sanitizers, [ROOT / "tests/ops/aio_stress.cpp", *ASYNC_IO.files()], folder / "stress")
    assert built.returncode == 0, built.stderr
    return folder / "stress"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | str]:
    """Both programs, compiled side by side."""
    folders = [tmp_path_factory.mktemp("stress") for _ in SANITIZERS]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SANITIZERS, pool.map(build, SANITIZERS, folders), strict=True))


@pytest.mark.in_make_test("address,undefined-io_uring", "thread-io_uring")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sanitizers", SANITIZERS)
def test_no_report(programs: dict[str, Path | str], sanitizers: str, backend: str, tmp_path: Path) -> None:
    """Four threads of transfers of every size and alignment, failures, and an engine that is freed in mid-flight."""
    program = programs[sanitizers]
    if isinstance(program, str):
        pytest.skip(program)
    ran = subprocess.run([program, BACKENDS[backend], tmp_path / "file"], capture_output=True, text=True, timeout=150)
    if ran.returncode == 77:
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert not ran.stderr
