"""``import deepspeed`` loads no torch, and no client can tell that the public names come later."""

import importlib
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import deepspeed
from tests.harness.rows import for_each

ROOT = Path(deepspeed.__file__).parent


def _fresh(code: str) -> str:
    """Standard output of ``code`` in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_torch_comes_with_what_answers_quickly_and_the_version_stays_text() -> None:
    code = (
        "import sys, deepspeed\n"
        "import deepspeed.version\n"
        "import deepspeed.version as submodule\n"
        "print(type(deepspeed.version).__name__, deepspeed.version == deepspeed.__version__)\n"
        "from deepspeed.version import __version__\n"
        "import deepspeed.config, deepspeed.errors, deepspeed.launcher.runner, deepspeed.tools.config.cli\n"
        "print('torch' in sys.modules)"
    )
    assert _fresh(code).split() == ["str", "True", "False"]


PATHS = """
comm.get_rank ops.adam.FusedAdam runtime.utils.see_memory_usage moe pipe.PipelineModule
checkpointing.configure checkpoint.utils.clone_tensors_for_torch_save launcher
zero.GatheredParameters zero.register_external_parameter utils.logging.logger utils.groups checkpointing.checkpoint
runtime.lr_schedules.VALID_LR_SCHEDULES runtime.engine.DeepSpeedEngine accelerator.get_accelerator
module_inject.layers.GatherReplacedLayerParams
"""
# An optimizer brings no compiler.
OPTIMIZERS = """
import sys, torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lion import FusedLion
for kind in (FusedAdam, FusedLion):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([weight])
    weight.grad = torch.ones(4)
    optimizer.step()
    assert len(optimizer.param_groups) == 1
    try:
        optimizer.add_param_group({'params': [weight]})
    except ValueError:
        assert 'torch._dynamo' not in sys.modules
        continue
    raise AssertionError("a weight was taken twice")
"""
ORDERS = (
    OPTIMIZERS,
    *(f"import deepspeed; assert deepspeed.{path} is not None" for path in PATHS.split()),
    "from deepspeed import *; import deepspeed; assert set(deepspeed.__all__) <= set(globals())",
    "import deepspeed, deepspeed.version; deepspeed.zero.Init; assert type(deepspeed.version) is str",
    "import deepspeed.dist as d, deepspeed.comm as c; assert d is c",
    "from deepspeed import dist; import deepspeed.comm as c; assert dist is c",
    "import deepspeed.comm; import deepspeed; assert deepspeed.dist is deepspeed.comm",
    "import deepspeed.runtime.zero.config; import deepspeed; deepspeed.zero.Init; deepspeed.runtime.utils",
    "import deepspeed.config; import deepspeed; deepspeed.config.load_config; deepspeed.DeepSpeedConfig",
    "from deepspeed import DeepSpeedEngine, log_dist; from deepspeed.utils import logger",
    "import deepspeed, threading as t; ts = [t.Thread(target=lambda: deepspeed.initialize) for _ in range(8)]; "
    "[x.start() for x in ts]; [x.join() for x in ts]; deepspeed.zero.Init",
    "import deepspeed\nfrom unittest import mock\n"
    "with mock.patch('deepspeed.initialize') as stand_in: assert deepspeed.initialize is stand_in\n"
    "assert deepspeed.initialize.__module__ == 'deepspeed.engine.initialize'",
)

# One interpreter that has what the package needs of others, and a child of it per snippet: each starts without any part
# of the package.
FORKS = """
import os, sys, traceback, hjson, psutil, pydantic.main, statistics, torch.nn.attention.flex_attention
assert "deepspeed" not in sys.modules
for code in eval(sys.argv[1]):
    child = os.fork()
    if child == 0:
        try:
            exec(code, {})
        except BaseException:
            sys.stderr.write(code + chr(10) + traceback.format_exc())
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_import_orders_and_what_optimizers_bring() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS, repr(ORDERS)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def test_every_listed_name_resolves_and_is_kept() -> None:
    for name in deepspeed.__all__:
        value = getattr(deepspeed, name)
        assert vars(deepspeed)[name] is value
    assert set(deepspeed.__all__) <= set(dir(deepspeed))


def test_no_value_hides_behind_a_submodule_of_its_name() -> None:
    """Importing a submodule binds its name on the package, which would replace a value of that name."""
    for name in deepspeed.__all__:
        if (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file():
            value, module = getattr(deepspeed, name), importlib.import_module(f"deepspeed.{name}")
            # ``version`` is bound before anyone can import the submodule
            assert value is module or name == "version", name


@for_each("name", ["foo", "initialise", "zero.Init", "", "__wrapped__", "__foo__", "x y"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(AttributeError, match="module 'deepspeed' has no attribute") as caught:
        getattr(deepspeed, name)
    assert caught.value.name == name


def test_unknown_name_in_from_import() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nothing_like_it'"):
        exec("from deepspeed import nothing_like_it")


def test_a_missing_dependency_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The absence of a dependency of a submodule must not read as the absence of the submodule."""
    monkeypatch.delitem(sys.modules, "deepspeed.tools", raising=False)
    monkeypatch.delattr(deepspeed, "tools", raising=False)
    real = importlib.import_module

    def broken(name: str, *rest: object) -> object:
        if name == "deepspeed.tools":
            raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
        return real(name, *rest)

    monkeypatch.setattr(deepspeed, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        _ = deepspeed.tools


def test_pickling_inspection_and_mocks() -> None:
    for name in ("DeepSpeedEngine", "OnDevice", "PipelineEngine", "DeepSpeedConfigError", "DeepSpeedHybridEngine"):
        value = getattr(deepspeed, name)
        assert pickle.loads(pickle.dumps(value)) is value
    assert inspect.getmodule(deepspeed.DeepSpeedEngine).__name__ == "deepspeed.engine.engine"
    assert "model" in inspect.signature(deepspeed.initialize).parameters
    assert dict(inspect.getmembers(deepspeed))["zero"] is deepspeed.zero
    for name in ("initialize", "init_distributed", "DeepSpeedEngine", "zero.Init", "checkpointing.configure"):
        owner, _, last = f"deepspeed.{name}".rpartition(".")
        home = importlib.import_module(owner) if owner != "deepspeed.checkpointing" else deepspeed.checkpointing
        real = getattr(home, last)
        with mock.patch(f"deepspeed.{name}", autospec=name == "init_distributed") as stand_in:
            assert getattr(home, last) is stand_in
        assert getattr(home, last) is real
