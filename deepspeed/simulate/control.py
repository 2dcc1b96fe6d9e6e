"""The messages of the ranks' programs to each other, in which they agree on one order of collectives, and their time.

Where one rank is simulated, all others are taken to say what it says. Where each is simulated in a process of its own
(``peers``), messages are gloo's, as on a real machine, and carry the processes' simulated time along: who has waited
for a message goes on when the last rank has sent it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed.comm import collectives
from deepspeed.comm.collectives import AxisGroup
from deepspeed.mesh import groups
from deepspeed.simulate.install import replaced
from deepspeed.simulate.record import Recorder
from deepspeed.zero import agreement

_PICOSECONDS = 1e12


class Control:
    """Sends the messages of one rank. Since ``restart``: ``messages``, and ``seconds`` of the program that they took,
    waits for slower ranks included.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._timeline = recorder.timeline
        self.restart()

    def restart(self) -> None:
        """Count from here on."""
        self.messages = 0
        self.seconds = 0.0

    def merge(self, largest: list[int], union: list[int], group: AxisGroup) -> tuple[list[int], list[int]]:
        """In the place of ``collectives.merge``."""
        seconds, now = self._timeline.machine.agreement(group.size), self._timeline.now
        (*largest, latest), union = collectives.merge([*largest, int(now * _PICOSECONDS)], union, group)
        seconds += max(0.0, latest / _PICOSECONDS - now)
        self._timeline.host_work(seconds, "agreement")
        self.messages, self.seconds = self.messages + 1, self.seconds + seconds
        return largest, union


@contextlib.contextmanager
def talking(recorder: Recorder, *, peers: bool = False) -> Iterator[Control]:
    """Inside, messages take their time. ``peers``: they are sent, to the processes that share the job's store."""
    control = Control(recorder)
    make, gather = groups._new_group, dist.all_gather_object
    count = dist.ProcessGroup._get_sequence_number_for_group  # type: ignore[attr-defined]

    def new_group(name: str, axis: Any, backend: str) -> AxisGroup:
        return make(name, axis, "gloo" if name.endswith("/control") else backend)

    def gather_objects(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            gather(*args, **kwargs)

    def collectives_of(group: Any) -> int:
        """Torch's process group without peers counts nothing, which would look like somebody else's collectives."""
        return recorder.collectives if "fake" in dist.get_backend(group) else count(group)

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (agreement, "merge", control.merge),
            (dist.ProcessGroup, "_get_sequence_number_for_group", collectives_of),
            *(((groups, "_new_group", new_group), (dist, "all_gather_object", gather_objects)) if peers else ()),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield control
