"""Installing: the sources travel in the wheel, a compiler is only needed where DS_BUILD_* asks for it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deepspeed.accelerator.native.builders import ALL_OPS
from tests.budget.source import ROOT
from tests.harness.compilers import GXX

TREE = ("deepspeed", "csrc", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
WHEEL = "import sys; from setuptools import build_meta; sys.stdout.write('>' + build_meta.build_wheel(sys.argv[1]))"
USE = """
from deepspeed.accelerator.native.builders import ALL_OPS, installed_ops
builder = ALL_OPS["cpu_checksum"]
assert installed_ops["cpu_checksum"] and builder.state().word == "built", builder.state()
assert "prebuilt" in builder.load()._name
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what an installation is made from."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
        else:
            shutil.copy(source, copy / name)
    return copy


def _build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DS_BUILD_")}
    command = [sys.executable, "-c", WHEEL, str(tree.parent)]
    return subprocess.run(command, cwd=tree, env={**clean, **environment}, capture_output=True, text=True, timeout=60)


def _wheel(tree: Path, **environment: str) -> Path:
    done = _build(tree, **environment)
    assert done.returncode == 0, done.stderr
    return tree.parent / done.stdout.rpartition(">")[2]


def test_a_plain_wheel_needs_no_compiler(tree: Path) -> None:
    wheel = _wheel(tree, PATH="/nowhere", CXX="/nowhere/c++")
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {
        "deepspeed/accelerator/native/csrc/README.md",
        "deepspeed/config/model/unread.json",
        "deepspeed/tools/config/starters/lora.json",
    } <= set(names) and not any("prebuilt" in name for name in names)


@pytest.mark.skipif(GXX is None, reason="needs a C++ compiler")
def test_a_wheel_with_libraries(tree: Path) -> None:
    for name in ALL_OPS["cpu_checksum"].spec().sources:
        source = tree / "csrc" / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.touch()
    wheel = _wheel(tree, DS_BUILD_CPU_CHECKSUM="1")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("any.whl")
    zipfile.ZipFile(wheel).extractall(tree.parent / "site")
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree.parent / "site"),
        "PATH": "/nowhere",
        "TORCH_EXTENSIONS_DIR": "/proc/nowhere",
    }
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tree.parent, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_what_is_asked_for_by_name_must_be_possible(tree: Path) -> None:
    done = _build(tree, DS_BUILD_GDS="1")
    assert done.returncode != 0 and "DS_BUILD_GDS=1 asks for gds, but this package does not have it" in done.stderr
