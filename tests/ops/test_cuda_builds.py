"""For which devices CUDA kernels are compiled, and which libraries are taken for them: a driver and a compiler that are
there for the test.
"""

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed.accelerator.native import build, builders, cache, compiler
from deepspeed.accelerator.native.spec import OpSpec
from deepspeed.errors import CUDAMismatchException, MissingCUDAException
from tests.harness.compilers import GXX

pytestmark = [pytest.mark.skipif(GXX is None, reason="needs a C++ compiler"), pytest.mark.usefixtures("native_cache")]


def test_cuda_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\necho Build cuda_13.0.r13.0/compiler.1_0\n"
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build, "torch_build", lambda: {"version": "2.13.0", "cuda": "12.8"})
    with pytest.raises(CUDAMismatchException, match=r"CUDA 13, torch is built for CUDA 12: .*DS_SKIP_CUDA_CHECK=1"):
        build.checked_compiler("cuda")
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    assert build.checked_compiler("cuda").command == (str(nvcc),)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(compiler, "NVCC_FOLDERS", ())
    with pytest.raises(MissingCUDAException, match="set CUDA_HOME"):
        build.checked_compiler("cuda")


NVCC = """#!/bin/sh
case "$1" in --list-gpu-arch) printf 'compute_75\\ncompute_80\\ncompute_90\\n'; exit;; esac
echo 'Cuda compilation tools, release 12.4, V12.4.1'
"""


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Devices of these architectures, in a driver that is there for the test; a compiler that knows three."""
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build, "torch_build", lambda: {"version": "2.13.0", "cuda": "12.8"})
    real = compiler.present_targets.__wrapped__

    def present(*architectures: int, fails: str = "") -> None:
        numbers = ", ".join(map(str, architectures)) or "0"
        source, library = tmp_path / "driver.cpp", tmp_path / f"driver{len(list(tmp_path.glob('driver*')))}.so"
        source.write_text(
            f"static int each[] = {{{numbers}}};\n"
            f'extern "C" int cuInit(unsigned) {{ return {int(fails == "cuInit")}; }}\n'
            f'extern "C" int cuDeviceGetCount(int* n) {{ *n = {len(architectures)}; return 0; }}\n'
            'extern "C" int cuDeviceGetAttribute(int* value, int what, int device) {\n'
            "  *value = what == 75 ? each[device] / 10 : what == 76 ? each[device] % 10 : -1;\n  return 0;\n}\n"
        )
        subprocess.run([GXX, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        monkeypatch.setattr(compiler, "present_targets", lambda: real(str(library)))

    yield present


def _flags(targets: Iterable[str]) -> list[str]:
    return [f"-gencode=arch=compute_{each}" for each in targets]


def test_kernels_are_compiled_for_the_devices_that_are_here(
    devices: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    op = OpSpec("any", ("any.cu",), kind="cuda")

    def commands() -> list[list[str]]:
        found = build.checked_compiler("cuda")
        both = found.object_command(op, Path("any.cu"), Path("any.o")), found.link_command(op, [], Path("any.so"))
        return [[word for word in command if word.startswith("-gencode")] for command in both]

    devices(90, 90)
    hopper = build.checked_compiler("cuda").identity()
    assert commands() == [_flags(["90,code=sm_90", "90,code=compute_90"])] * 2
    devices(90, 80)
    assert commands()[0] == _flags(["80,code=sm_80", "90,code=sm_90", "90,code=compute_90"])
    assert build.checked_compiler("cuda").identity() != hopper  # a library of its own in a folder that nodes share
    devices(120)  # newer than this compiler: the newest that it knows runs there as PTX
    assert commands()[0] == _flags(["90,code=sm_90", "90,code=compute_90"])
    assert builders.FusedAdamBuilder().compute_capability_args() == _flags(["120,code=sm_120", "120,code=compute_120"])
    both = _flags(["80,code=sm_80", "90,code=sm_90", "90,code=compute_90"])
    for nothing in ([], [90]):
        devices(*nothing, fails="cuInit" if nothing else "")
        assert commands()[0] == both


def test_an_explicit_list_of_architectures_is_followed(
    devices: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(90)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6;9.0a+PTX")
    assert build.checked_compiler("cuda").targets == compiler.shipped_targets() == ("86", "90a")
    flags = _flags(["86,code=sm_86", "90a,code=sm_90a", "90a,code=compute_90a"])
    assert compiler.gencode(compiler.wanted_targets()) == flags
    assert builders.FusedAdamBuilder().compute_capability_args("7.0") == _flags(["70,code=sm_70", "70,code=compute_70"])


def test_a_library_that_has_no_code_for_a_device_is_not_taken(
    tiny: OpSpec, tmp_path: Path, devices: Callable[..., None]
) -> None:
    """Or the first launch would fail: a folder may be shared, and a package be built elsewhere."""
    kernel = replace(tiny, kind="cuda")
    library = tmp_path / "cache/deepspeed" / f"{kernel.stem()}-0.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "made.so").write_bytes(b"library")
    cache.publish(tmp_path / "made.so", library, {"targets": ["80", "90"]})
    for device, found in ((80, library), (86, library), (75, None), (90, library), (120, library)):
        devices(device)
        assert build.built(kernel) == found, device
    devices()
    assert build.built(kernel) == library  # nothing is known against it
    assert not compiler.covers(["80", "90a"], ["120"]) and compiler.covers(["80", "90a"], ["90", "89"])
    assert not compiler.covers(["90a"], ["91"])


def test_whether_a_library_is_there_is_told_without_a_start_of_cuda(
    tiny: OpSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports ask it: CUDA_VISIBLE_DEVICES may be set, and a process forked, after them."""
    kernel = replace(tiny, kind="cuda")
    (tmp_path / "made.so").write_bytes(b"library")
    cache.publish(tmp_path / "made.so", tmp_path / f"{kernel.stem()}.so", {"targets": ["80", "90"]})
    monkeypatch.setattr(cache, "SHIPPED", tmp_path)
    monkeypatch.setattr(build, "torch_build", lambda: {"version": "2.13.0", "cuda": "12.8"})
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(compiler, "NVCC_FOLDERS", ())
    monkeypatch.setattr(compiler, "present_targets", lambda: pytest.fail("the driver is asked"))
    monkeypatch.setattr(builders.CUDAOpBuilder, "SPEC", kernel)
    assert builders.CUDAOpBuilder("tiny").is_shipped() and builders.CUDAOpBuilder("tiny").is_compatible()


def test_what_is_shipped_runs_on_other_machines_too(devices: Callable[..., None]) -> None:
    devices(120)
    assert compiler.shipped_targets() == ("80", "90", "120")
    devices()
    assert compiler.shipped_targets() == ("80", "90")


@pytest.mark.skipif(shutil.which("nvcc") is None or platform.system() != "Linux", reason="needs nvcc")
def test_a_kernel_compiles(tiny: OpSpec, tmp_path: Path) -> None:
    (tmp_path / "src/scale.cu").write_text(
        "__global__ void scale(float* x, float by, long n) { long i = blockIdx.x * 256L + threadIdx.x; if (i < "
        "n) x[i] *= by; }\n"
        'extern "C" int launch(float* x, float by, long n, void* stream) {\n'
        "  scale<<<(n + 255) / 256, 256, 0, (cudaStream_t)stream>>>(x, by, n);\n  return (int)cudaGetLastError();\n}\n"
    )
    library = build.load(replace(tiny, sources=("scale.cu",), kind="cuda"))
    assert isinstance(library.launch, ctypes._CFuncPtr)  # type: ignore[attr-defined]
