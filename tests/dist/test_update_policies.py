"""Policies of the update are files: the core names none of them, and trains without any one."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.zero.update.registry import policies
from tests.budget.source import PACKAGE, ROOT

# The files that know no policy by name: everything that trains but the policies, and the registry, which finds them.
CORE = (
    "zero/*.py",
    "zero/memory/*.py",
    "zero/module/*.py",
    "client/zero/*.py",
    "tier/*.py",
    "optim/*.py",
    "engine/*.py",
)
POLICIES = ["delayed", "selective", "speculative", "staged"]
BESIDE = ("apply", "inline", "partial", "policy", "publish", "registry", "result", "tiled")  # of zero/update
# How policies are called in code; the keys of the configuration stand in the sentences of errors.
NAMES = re.compile(
    r"\b(delayed|speculative|staged|selective|zenflow)\b|\b(Delayed|Speculative|Staged|Selective|ZenFlow)\w*"
)

TRAIN = """
import os, sys, torch, deepspeed
os.environ.update(DEEPSPEED_UPDATE_BEHIND="1")
for zero in ({"stage": 3}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": zero}
    engine = deepspeed.initialize(model=model, config=config)[0]
    for _ in range(3):
        loss = engine(torch.ones(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()
    engine.destroy()
print("trained", float(loss.detach()))
"""


def _code(path: Path) -> list[tuple[int, str]]:
    """Lines without strings and comments."""
    text = re.sub(r'"""(?:.|\n)*?"""', lambda match: "\n" * match.group().count("\n"), path.read_text())
    lines = (re.sub(r'f?"[^"\n]*"|#.*', "", line) for line in text.splitlines())
    return [*enumerate(lines, start=1)]


def test_the_core_names_no_policy() -> None:
    files = [path for pattern in CORE for path in PACKAGE.glob(pattern)]
    files += [PACKAGE / "zero" / "update" / f"{name}.py" for name in BESIDE]
    named = [
        f"{path.relative_to(ROOT)}:{n} {line.strip()}"
        for path in files
        for n, line in _code(path)
        if NAMES.search(line)
    ]
    assert not named


def test_every_policy_is_here() -> None:
    assert [module.__name__.rpartition(".")[2] for module in policies()] == POLICIES


@pytest.mark.timeout(180)
def test_without_policies_everything_else_trains(tmp_path: Path) -> None:
    """All of them at once, as none imports another."""
    folder = tmp_path / "deepspeed" / "zero" / "update"
    shutil.copytree(PACKAGE, tmp_path / "deepspeed")  # with what Python has compiled
    for name in POLICIES:
        others = "|".join(other for other in POLICIES if other != name)
        for path in [folder / f"{name}.py", *(folder / name).glob("*.py")]:
            assert not path.exists() or not re.search(rf"update(\.| import )({others})\b", path.read_text())
    for name in POLICIES:
        gone = folder / name
        shutil.rmtree(gone) if gone.is_dir() else gone.with_suffix(".py").unlink()
    command = [sys.executable, "-c", TRAIN]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0 and "trained" in ended.stdout, ended.stderr[-2000:]
