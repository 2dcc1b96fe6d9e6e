"""Tests that need a device do not run everywhere, so what can be seen of them without one is: that they name what there
is, and that their configurations are accepted.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest

from deepspeed.config import load_config
from deepspeed.engine import DeepSpeedEngine
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import UnitPlan
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.unit import Unit
from tests.gpu import test_offload_cuda as offload

FILES = sorted(Path(offload.__file__).parent.glob("test_*.py"))
KINDS: dict[str, type] = {"engine": DeepSpeedEngine, "unit": Unit, "u": Unit, "view": OptimView}
PARTS: dict[str, type] = {"runtime": Runtime, "plan": UnitPlan, "unit": Unit}


def _has(kind: type, name: str) -> bool:
    """Whether objects of ``kind`` have that, by their class or as a method of it sets it."""
    ours = [cls for cls in kind.__mro__ if cls.__module__.startswith("deepspeed.")]
    sources = "".join(inspect.getsource(cls) for cls in ours)
    return hasattr(kind, name) or re.search(rf"self(\.\w+, self)*\.{name}\b|^    {name}:", sources, re.M) is not None


def _asked(tree: ast.AST) -> set[tuple[type, str]]:
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=holder), attr=name) if holder in KINDS:
                found.add((KINDS[holder], name))
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id=owner), attr=part), attr=name) if (
                owner in KINDS and part in PARTS
            ):
                found.add((PARTS[part], name))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_they_ask_of_engines_and_units_is_there(path: Path) -> None:
    missing = [f"{kind.__name__}.{name}" for kind, name in _asked(ast.parse(path.read_text())) if not _has(kind, name)]
    assert not missing


def test_the_configurations_of_offload_are_accepted(tmp_path: Path) -> None:
    for stage, name in offload.CELLS:
        load_config(offload.config(stage, "bf16", offload.places(tmp_path)[name]), world_size=1)
    for stage in (2, 3):
        for zero in offload.LATE.values():
            load_config(offload.config(stage, "fp32", zero), world_size=1)
