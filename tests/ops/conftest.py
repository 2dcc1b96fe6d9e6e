"""Fixtures of the file IO tests: every backend, files with and without O_DIRECT."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed.tier import aio
from deepspeed.tier.aio import AioEngine, DirectFile, TransferError
from tests.harness.aio import BACKENDS, KIB, Make, refuse_direct


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
