"""Everything but the version and the native sources is in pyproject.toml; the version has one home,
deepspeed/version.py.

A plain install compiles nothing: the sources travel in the package and are compiled on first use. ``DS_BUILD_OPS=1``,
or ``DS_BUILD_CPU_ADAM=1`` and so on, compile at install time.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# DS_BUILD_OPS=1 or that of a single op
PREBUILD = any(name.startswith("DS_BUILD_") and value == "1" for name, value in os.environ.items())


def read_version() -> str:
    """Return the version without importing the package, which would need torch."""
    text = (ROOT / "deepspeed" / "version.py").read_text(encoding="utf-8")
    match = re.search(r"""^(?:__version__|version)(?:\s*:\s*\w+)?\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    if match is None:
        raise ValueError("deepspeed/version.py holds no line of the form: version = '...'")
    return match.group(1)


def prebuild(folder: Path) -> None:
    """Compile the ops that DS_BUILD_* ask for into ``folder``; what is asked for by name must succeed."""
    sys.path.insert(0, str(ROOT))
    from deepspeed.accelerator.native import build, builders  # noqa: PLC0415 - a plain install imports nothing of the package

    every = os.environ.get("DS_BUILD_OPS", "0")
    for builder in builders.ALL_OPS.values():
        if os.environ.get(builder.BUILD_VAR, every) != "1":
            continue
        reason = builder.why_not()
        if not reason:
            build.ship(builder.spec(), folder)
        elif builder.BUILD_VAR in os.environ:
            raise SystemExit(f"{builder.BUILD_VAR}=1 asks for {builder.name}, but {reason}")


class BuildPackage(build_py):
    """Adds the native sources, and their libraries where they are asked for."""

    def run(self) -> None:
        """Copy the Python files, then add to them; an editable install uses the sources of the checkout."""
        super().run()
        native = (ROOT if self.editable_mode else Path(self.build_lib)) / "deepspeed" / "accelerator" / "native"
        if not self.editable_mode:
            shutil.rmtree(native / "csrc", ignore_errors=True)
            shutil.copytree(ROOT / "csrc", native / "csrc")
        shutil.rmtree(native / "prebuilt", ignore_errors=True)
        if PREBUILD:
            prebuild(native / "prebuilt")


class Package(Distribution):
    """With libraries in it, the wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        """Whether there is compiled code."""
        return PREBUILD


class Wheel(bdist_wheel):
    """The libraries do not depend on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3; this platform where there is compiled code."""
        return ("py3", "none", super().get_tag()[2])


setup(version=read_version(), distclass=Package, cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel})
