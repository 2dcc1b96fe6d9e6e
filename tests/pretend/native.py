"""The library of the device that pretends: built once for each torch, compiler and source, kept in the user's cache."""

import ctypes
import functools
import importlib.util
from dataclasses import replace
from pathlib import Path

import torch

from deepspeed.accelerator.native import build, cache
from deepspeed.accelerator.native.spec import OpSpec
from deepspeed.errors import BuildError

FOLDER = Path(__file__).parent


def _spec() -> OpSpec:
    found = importlib.util.find_spec("torch")
    torch = Path(str(found and found.origin)).parent
    includes = [f"-isystem{torch / 'include'}", f"-isystem{torch / 'include/torch/csrc/api/include'}"]
    flags = ("-std=c++20", "-O1", "-g0", *includes, f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}")
    return OpSpec("pretend", ("device.cpp",), root=FOLDER, flags=flags, libraries=("torch_cpu", "c10"))


@functools.cache
def library() -> Path:
    """Where it is, built first where it is not; BuildError when that fails. A build that is killed leaves nothing."""
    # torch and this share exceptions: both have the runtime that the process has
    op, compiler = _spec(), replace(build.checked_compiler("cpp"), static_runtime=False)
    path = cache.folder() / f"{build._stem(op, compiler)}.so"
    if not cache.is_good(path):
        build._build_into(path, op, compiler)
    return path


def reason() -> str:
    """Why there is none here; empty where there is one."""
    if torch.version.cuda is not None:
        return "the device that pretends is not here: torch with CUDA takes no other device"
    try:
        library()
    except BuildError as error:
        return f"the device that pretends is not here: {error}"
    return ""


def load() -> ctypes.CDLL:
    """It, with what its functions take; they let go of the GIL."""
    made = ctypes.CDLL(str(library()))
    pointer, number, stream = ctypes.c_void_p, ctypes.c_int, [ctypes.c_int, ctypes.c_int64]
    takes = {
        "order": [number, ctypes.c_uint], "set_device": [number], "exchange_device": [number], "new_stream": [number],
        "current_stream": [number], "choose_stream": stream, "record": [pointer, *stream], "wait": [pointer, *stream],
        "query": [pointer], "finish_event": [pointer], "free_event": [pointer], "time": [pointer],
        "finish_stream": stream, "idle": stream, "finish_device": [number], "submit": [*stream, ctypes.c_int64],
        "failure": [ctypes.c_char_p, number], "fault": [ctypes.c_char_p, number], "in_use": [number], "peak": [number],
        "reset_peak": [number], "lock": [ctypes.c_size_t, ctypes.c_size_t], "unlock": [ctypes.c_size_t],
        "callback": [pointer], "new_event": [], "current_device": [],
    }  # fmt: skip
    wide = dict.fromkeys(("new_stream", "current_stream", "in_use", "peak"), ctypes.c_int64)
    gives = {**wide, "new_event": pointer, "time": ctypes.c_double}
    for name, kinds in takes.items():
        function = getattr(made, f"pretend_{name}")
        function.argtypes, function.restype = kinds, gives.get(name, number)
    return made
