"""A file filled tensor by tensor is what torch.save would have written, as far as torch.load can tell; and holds one
tensor in memory.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.foreign.weights import torch_file

STATE = {
    "a": torch.randn(3, 5),
    "empty": torch.zeros(0, 4),
    "b.bias": torch.randn(7).bfloat16(),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "mask": torch.tensor([True, False, True]),
    "big": torch.randn(100_003),
    "count": torch.tensor(4),
}


def shapes() -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {n: (t.dtype, tuple(t.shape)) for n, t in STATE.items()}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_torch_load_gets_every_tensor(tmp_path: Path, weights_only: bool, mmap: bool) -> None:  # noqa: FBT001
    path = tmp_path / "m.bin"
    with torch_file(path, shapes(), aliases={"tied": "a"}) as write:
        for name in reversed(STATE):
            flat = STATE[name].reshape(-1)
            half = flat.numel() // 2
            write(name, flat[half:], start=half)
            write(name, flat[:half])
        assert not path.exists()
    found = torch.load(path, weights_only=weights_only, mmap=mmap)
    assert list(found) == [*STATE, "tied"]
    for name, value in STATE.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    assert found["tied"].data_ptr() == found["a"].data_ptr()
    assert [p.name for p in tmp_path.iterdir()] == ["m.bin"]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="stop"), torch_file(path, shapes(), aliases={}):
        raise RuntimeError("stop")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["m.bin"]


def test_a_large_file_costs_the_memory_of_one_tensor(tmp_path: Path) -> None:
    script = f"""
import resource, torch
from pathlib import Path
from deepspeed.checkpoint.foreign.weights import torch_file
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tensors = {{f"w{{i}}": (torch.float32, (4 << 20,)) for i in range(8)}}
with torch_file(Path({str(tmp_path)!r}) / "m.bin", tensors, aliases={{}}) as write:
    for i in range(8):
        write(f"w{{i}}", torch.full((4 << 20,), float(i)))
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
"""
    # glibc otherwise keeps large blocks in its heap after the first was freed, with gaps that depend on the run
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)
    found = torch.load(tmp_path / "m.bin", mmap=True)
    assert all(float(found[f"w{i}"][-1]) == i for i in range(8))
