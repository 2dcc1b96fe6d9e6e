"""A rank that cannot go on ends what others wait for: closed connections of gloo tell their hosts, which stop waiting,
and communicators of nccl are aborted, in which else devices wait until nccl's own time limit.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepspeed.comm import collectives
from deepspeed.comm.collectives import AxisGroup, break_off
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.zero.sync.failures import break_off_all


class Backend(SimpleNamespace):
    __hash__ = object.__hash__


def _group(name: str, backend: str, said: list[str], *, size: int = 2, fails: bool = False) -> AxisGroup:
    def abort() -> None:
        said.append(name)
        if fails:
            raise RuntimeError(f"{backend} does not support abort")

    return AxisGroup(Backend(abort=abort, name=name), size, 0, tuple(range(size)), backend)  # type: ignore[arg-type]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was ended, in order."""
    ended: list[str] = []

    def irecv(*_: Any, group: Any, **__: Any) -> Any:
        return mock.Mock(wait=lambda _: ended.append(group.name))

    monkeypatch.setattr(collectives.dist, "irecv", irecv)
    return ended


def test_the_communicator_of_a_device_is_aborted_and_one_that_cannot_abort_raises_nothing(said: list[str]) -> None:
    break_off(_group("alone", "nccl", said, size=1))  # nobody waits in a group of one
    break_off(AxisGroup(None, 1, 0, (0,), "none"))
    assert not said
    break_off(_group("wait", "nccl", said))
    break_off(_group("other", "xccl", said, fails=True))
    assert said == ["wait", "other"]


def test_hosts_hear_before_devices_are_ended_of_every_group(said: list[str]) -> None:
    """A host that hears of it aborts its own; an abort may take as long as the driver does."""
    axis, tp, pp = (_group(name, "nccl", said) for name in ("axis", "tp", "pp"))
    control, host = (_group(name, "gloo", said) for name in ("control", "host"))
    made = (_group("made", "nccl", said),)
    break_off_all(Mesh((axis,), axis, axis, axis, control, tp=tp, pp=pp, host=host, made=made))
    assert said[:2] == ["control", "host"] and sorted(said[2:]) == ["axis", "made", "pp", "tp"]
