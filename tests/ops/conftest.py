"""Fixtures of the file IO tests (every backend, files with and without O_DIRECT) and of native builds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed.accelerator.native import build
from deepspeed.accelerator.native.spec import OpSpec
from deepspeed.tier import aio
from deepspeed.tier.aio import AioEngine, DirectFile, TransferError
from tests.harness.aio import BACKENDS, KIB, Make, refuse_direct

TINY = '#include "tiny.h"\nextern "C" int add(int a, int b) { return a + b + OFFSET; }\n'


@pytest.fixture(params=BACKENDS)
def make_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines of one backend; "python" is what there is without a compiler."""
    engines: list[AioEngine] = []
    if request.param == "python":
        monkeypatch.setattr(aio, "try_load", lambda op: None)

    def engine(**options: int) -> AioEngine:
        backend = "auto" if request.param == "python" else request.param
        try:
            engines.append(
                AioEngine(backend=backend, **{"queue_depth": 8, "block_bytes": 64 * KIB, "threads": 2, **options})
            )
        except TransferError as error:
            pytest.skip(str(error))
        assert engines[-1].backend == request.param
        return engines[-1]

    yield engine
    for each in engines:
        each.close()


@pytest.fixture(params=["direct", "plain"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectFile]:
    """An empty file, with and without O_DIRECT."""
    with monkeypatch.context() as patch:
        if request.param == "plain":
            refuse_direct(patch)
        opened = DirectFile(tmp_path / "data", create=True)
    if request.param == "direct" and not opened.direct:
        pytest.skip("this filesystem has no O_DIRECT")
    assert opened.direct == (request.param == "direct")
    with opened:
        yield opened


@pytest.fixture
def native_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder for native libraries, and none of the variables that builds read."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "DS_SKIP_CUDA_CHECK"):
        monkeypatch.delenv(name, raising=False)
    for cached in (build.load, build.try_load):
        cached.cache_clear()
    yield
    for cached in (build.load, build.try_load):
        cached.cache_clear()


@pytest.fixture
def tiny(tmp_path: Path) -> OpSpec:
    """An op of one function, which adds."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/tiny.cpp").write_text(TINY)
    (tmp_path / "src/tiny.h").write_text("#define OFFSET 0\n")
    return OpSpec("tiny", ("tiny.cpp",), root=tmp_path / "src")
