"""The CUDA sources compile, name no torch, export what is called, and, compiled for the host, pass the tests of
tests/gpu.

The last needs no GPU and no CUDA: a few macros turn the sources into C++, and a launch runs each thread of each block
as a fiber on the CPU. Same rules, same chunks, same alignment, same reductions; only speed and the memory model are
missing.
"""

import contextlib
import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspeed.accelerator.native.build import build, checked_compiler
from deepspeed.accelerator.native.spec import FUSED_ADAM, FUSED_LAMB, FUSED_LION, OpSpec, short_hash, source_root
from deepspeed.errors import BuildError
from deepspeed.optim import cuda
from tests.gpu.test_fused_optimizers import (  # noqa: F401 - collected here too, with the fixture ``place`` of this file
    ADAM,
    draw,
    test_a_class_updates_what_no_kernel_is_compiled_for_with_torch,
    test_a_grad_scaler_is_heard,
    test_a_step_must_be_on_the_device_in_fp32,
    test_adam_equals_the_host_kernel_bit_by_bit,
    test_adam_follows_torch,
    test_alignment_changes_no_bit,
    test_an_overflow_changes_nothing,
    test_dtypes_that_no_kernel_is_compiled_for_are_refused_and_change_nothing,
    test_every_dtype_is_the_fp32_rule_with_rounded_inputs_and_outputs,
    test_host_tensors_are_refused,
    test_hundreds_of_tensors_of_mixed_dtypes_and_none_of_length_zero_hurts,
    test_lamb_follows_the_host_class,
    test_lamb_of_16_bit_parameters,
    test_lamb_repeats_its_bits_and_writes_the_rounded_weights,
    test_lion_equals_the_host_kernel_bit_by_bit,
    test_lion_in_16_bits,
    test_numbers_on_the_device_are_those_of_the_host,
    test_tensors_that_do_not_fit,
    test_the_default_dtype_changes_no_bit,
    test_the_named_classes_run_on_the_kernels,
    test_the_named_classes_write_the_rounded_weights,
    test_what_the_device_leaves_out_changes_nothing_and_counts_for_nothing,
)

OPS = (FUSED_ADAM, FUSED_LION, FUSED_LAMB)

# What the sources use of CUDA, on the host. A launch runs block after block and, in each, one fiber per thread up to
# the next barrier.
HOST_CUDA = r"""
#pragma once
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
struct Index { unsigned x; };
inline Index threadIdx, blockIdx;
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t error) { return error ? "cudaErrorInvalidValue" : "cudaSuccess"; }
inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }

struct Fiber { ucontext_t context; std::unique_ptr<char[]> stack; bool done; };
constexpr size_t kStack = 64 << 10;
inline std::vector<Fiber> fibers(256);
inline ucontext_t scheduler;
inline std::function<void()> body;
inline void enter() { body(); fibers[threadIdx.x].done = true; }
inline void __syncthreads() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

inline void emulate(int blocks, int threads, bool barriers, std::function<void()> kernel) {
    body = std::move(kernel);
    for (int b = 0; b < blocks; ++b) {
        blockIdx.x = b;
        for (int t = 0; t < threads && !barriers; ++t) { threadIdx.x = t; body(); }
        if (!barriers) continue;
        for (Fiber& each : fibers) {
            if (!each.stack) each.stack.reset(new char[kStack]);
            getcontext(&each.context);
            each.context.uc_stack.ss_sp = each.stack.get();
            each.context.uc_stack.ss_size = kStack;
            each.context.uc_link = &scheduler;
            each.done = false;
            makecontext(&each.context, enter, 0);
        }
        for (int left = threads; left > 0;)
            for (int t = 0; t < threads; ++t) {
                if (fibers[t].done) continue;
                threadIdx.x = t;
                swapcontext(&scheduler, &fibers[t].context);
                left -= fibers[t].done;
            }
    }
}
"""
HOST_BF16 = r"""
#pragma once
#include <cstdint>
#include <cstring>
namespace lowp {
#include "common/lowp.h"
}
inline unsigned short __float2bfloat16_rn(float x) { return lowp::ds::BF16::make(x).bits; }
inline unsigned short __bfloat16_as_ushort(unsigned short x) { return x; }
inline unsigned short __float2half_rn(float x) { return lowp::ds::F16::make(x).bits; }
inline unsigned short __half_as_ushort(unsigned short x) { return x; }
inline unsigned short __ushort_as_half(unsigned short x) { return x; }
inline float __half2float(unsigned short x) { return lowp::ds::F16::get({x}); }
"""
# name<<<grid, block, 0, stream>>>(
LAUNCH = re.compile(r"(\w+(?:<[\w, ]+>)?)<<<([^,]+), ([^,]+), 0, \w+\(\w+\)>>>\(")


def host_source(text: str) -> str:
    """The C++ of a CUDA source: every launch a call of ``emulate``."""

    def call(match: re.Match[str]) -> str:
        barriers = "true" if match[1].startswith(("lamb_moments", "lamb_ratios")) else "false"
        kernel = f"[=] {{ {match[1]}(each...); }}"
        return f"([&](auto... each) {{ emulate({match[2]}, {match[3]}, {barriers}, {kernel}); }})("

    return LAUNCH.sub(call, text)


@pytest.fixture(scope="module")
def host_libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[OpSpec, ctypes.CDLL]:
    if shutil.which("g++") is None or platform.system() != "Linux":
        pytest.skip("needs g++ on Linux")
    folder = tmp_path_factory.mktemp("host")
    shutil.copytree(source_root() / "common", folder / "common")
    (folder / "cuda").mkdir()
    for path in (source_root() / "cuda").iterdir():
        name = path.with_suffix(".cpp").name if path.suffix == ".cu" else path.name
        (folder / "cuda" / name).write_text(host_source(path.read_text()))
    for name, text in (("cuda_runtime.h", HOST_CUDA), ("cuda_bf16.h", HOST_BF16), ("cuda_fp16.h", "")):
        (folder / name).write_text(text)

    # a wide access that is not aligned ends a CUDA kernel; here it must not pass either
    strict = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    seen = short_hash([HOST_CUDA, HOST_BF16, (folder / "common/lowp.h").read_text()])  # included by <name>
    flags = ("-O1", "-w", "-ffp-contract=off", *strict, f"-DEMULATED={seen}")

    def compile_one(op: OpSpec) -> ctypes.CDLL:
        source = op.sources[0].replace(".cu", ".cpp")
        return ctypes.CDLL(str(build(OpSpec(f"host_{op.name}", (source,), flags=flags, root=folder))))

    with ThreadPoolExecutor(3) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "g++")
        return dict(zip(OPS, pool.map(compile_one, OPS), strict=True))


@pytest.fixture
def place(host_libraries: dict[OpSpec, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Host memory in the place of a device's."""
    monkeypatch.setattr(cuda, "try_load", host_libraries.get)
    monkeypatch.setattr(cuda, "on_cuda", lambda tensor: True)
    monkeypatch.setattr(
        cuda,
        "usable",
        lambda _, columns: all(t.is_contiguous() for c in columns for t in c) and all(map(cuda._compiled, *columns)),
    )
    monkeypatch.setattr(cuda, "_stream", lambda device: contextlib.nullcontext(0))
    cuda._kernel.cache_clear()
    yield "cpu"
    cuda._kernel.cache_clear()


def test_an_error_of_cuda_has_its_name(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # fields that the kernel side does not know: what a library of another version would see
    monkeypatch.setattr(cuda.ctypes, "sizeof", lambda _kind: 1)
    with pytest.raises(RuntimeError, match=r"fused_adam failed with cudaErrorInvalidValue \(1\) on cuda:0"):
        cuda.adam_step(*draw((4,), place=place), step=1, **ADAM)


# --- the sources, and nvcc ---


def test_no_source_needs_torch() -> None:
    sources = [path for path in source_root().rglob("*") if path.suffix in {".cpp", ".h", ".cu", ".cuh"}]
    assert {path.name for path in sources} >= {"fused_adam.cu", "fused_lion.cu", "fused_lamb.cu", "multi_tensor.cuh"}
    found = [
        path.name
        for path in sources
        if re.search(r"#\s*include\s*[<\"](torch|ATen|c10|pybind11|Python\.h)", path.read_text())
    ]
    assert not found
    assert not [path.name for path in sources if not path.read_bytes().isascii()]


def device_build(architectures: str) -> dict[OpSpec, Path]:
    """Each op compiled with the flags of a user's build, any warning an error."""
    try:
        checked_compiler("cuda")
    except BuildError as error:
        pytest.skip(str(error))
    strict = ("-Werror", "all-warnings", "-Xptxas", "-warn-spills", "-Xptxas", "-warn-lmem-usage")
    with ThreadPoolExecutor(3) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
        libraries = pool.map(lambda op: build(replace(op, flags=(*op.flags, *strict))), OPS)
        return dict(zip(OPS, libraries, strict=True))


@pytest.fixture(scope="module")
def device_libraries() -> dict[OpSpec, Path]:
    """Each op compiled for sm_90."""
    return device_build("9.0")


@pytest.mark.timeout(300)
def test_every_op_compiles_for_hopper(device_libraries: dict[OpSpec, Path]) -> None:
    for op, library in device_libraries.items():
        assert b"sm_90" in library.read_bytes(), op.name


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_every_op_compiles_for_ampere_and_hopper_in_one_library() -> None:
    for op, library in device_build("8.0;9.0").items():
        contents = library.read_bytes()
        assert all(target in contents for target in (b"sm_80", b"sm_90")), op.name


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.timeout(300)
def test_the_symbols_that_python_calls_are_there(device_libraries: dict[OpSpec, Path]) -> None:
    for op, library in device_libraries.items():
        symbols = subprocess.run(
            ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert {f"ds_{op.name}", f"ds_{op.name}_error"} <= set(symbols)
        needed = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
        ).stdout
        assert not re.search(r"\bcuda[A-Z]|c10|torch", needed), (
            "the library must load beside any torch and without a toolkit"
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a device")
@pytest.mark.timeout(300)
def test_without_a_device_the_call_fails_with_cudas_reason(
    device_libraries: dict[OpSpec, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "try_load", lambda op: ctypes.CDLL(str(device_libraries[op])))
    cuda._kernel.cache_clear()
    with pytest.raises(RuntimeError, match=r"fused_adam failed with cudaError\w+ \(\d+\) on cuda:0"):
        cuda._kernel(FUSED_ADAM)(cuda._Call(bytes=ctypes.sizeof(cuda._Call)))
    cuda._kernel.cache_clear()
