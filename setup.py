"""Everything but the version is in pyproject.toml; the version has one home, deepspeed/version.py."""

import re
from pathlib import Path

from setuptools import setup


def read_version() -> str:
    """Return the version without importing the package, which would need torch."""
    text = (Path(__file__).parent / "deepspeed" / "version.py").read_text(encoding="utf-8")
    match = re.search(r"""^(?:__version__|version)(?:\s*:\s*\w+)?\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    if match is None:
        raise ValueError("deepspeed/version.py holds no line of the form: version = '...'")
    return match.group(1)


setup(version=read_version())
