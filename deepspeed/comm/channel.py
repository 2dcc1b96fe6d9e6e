"""What the processes of a job tell each other beside the collectives: values under keys of one store.

No call here is a collective, so a rank that has raised, or was lost, holds nobody. A store answers the calls of one
connection in turn: a thread that talks while others work or wait has a connection of its own. Waits ask again and
again, as a wait inside the store would keep all calls of its connection waiting.
"""

import json
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch.distributed as dist

GONE = (RuntimeError, ValueError)  # what a call raises when the store went with the process that kept it
_LEAST_POLL_S, _MOST_POLL_S = 0.001, 0.02


class Channel:
    """Keys under ``name`` in any store of torch; values are what JSON has, None where a key was never set."""

    def __init__(self, store: dist.Store, name: str = "") -> None:
        self._store = dist.PrefixStore(name, store) if name else store

    def apart(self) -> "Channel":
        """Return the same channel over a connection of its own."""
        return Channel(self._store.clone())  # type: ignore[attr-defined]

    def put(self, key: str, value: Any = "") -> None:
        """Set the value of ``key``."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Return the value of ``key``, without waiting for it."""
        return _value(self._store.get(key)) if self._store.check([key]) else None

    def has(self, *keys: str) -> bool:
        """Tell whether all ``keys`` are set."""
        return bool(self._store.check([*keys]))

    def of(self, kind: str, members: Iterable[int]) -> dict[int, Any]:
        """Return the values of the keys ``kind/MEMBER`` that are set, by member."""
        values = {member: self.get(f"{kind}/{member}") for member in members}
        return {member: value for member, value in values.items() if value is not None}

    def claim(self, key: str, value: Any) -> Any:
        """Set ``key`` if nobody has, or after it was given up; return the value of the one who came first."""
        return self.swap(key, None, value)

    def swap(self, key: str, before: Any, after: Any) -> Any:
        """Set ``key`` to ``after`` if it is ``before`` (None: nobody's); return its value then."""
        old, new = ("" if value is None else json.dumps(value) for value in (before, after))
        return _value(self._store.compare_set(key, old, new))

    def add(self, key: str, number: int = 0) -> int:
        """Add to a counter, which begins at 0; return its value."""
        return int(self._store.add(key, number))

    def drop(self, key: str) -> None:
        """Take ``key`` back."""
        self._store.delete_key(key)

    def push(self, queue: str, value: Any) -> None:
        """Add ``value`` to a queue."""
        self._store.queue_push(queue, json.dumps(value))

    def pop(self, queue: str) -> Any:
        """Return the next value of a queue; None if it is empty. (Its length would keep all threads waiting.)"""
        try:
            return _value(self._store.queue_pop(queue, block=False))
        except dist.QueueEmptyError:
            return None

    def wait(self, *keys: str, seconds: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all ``keys`` are set, at most ``seconds`` or until ``stop()``; tell whether they are."""
        end, pause_s = time.monotonic() + seconds, _LEAST_POLL_S
        while not self.has(*keys):
            if time.monotonic() >= end or stop():
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_POLL_S)
        return True


def _value(text: bytes) -> Any:
    return json.loads(text) if text else None


def job_channel(name: str) -> Channel:
    """Return the channel ``name`` of the default group's store: of one attempt, where a launcher starts a job anew."""
    return Channel(dist.distributed_c10d._get_default_store(), name)


class SteadyClock:
    """Seconds that this process has seen pass: those between two looks count for at most ``most_s``.

    A process that was suspended, or kept by a busy machine, takes no other for silent.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = most_s, clock
        self._before, self._seconds = clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._seconds += min(now - self._before, self._most_s)
        self._before = now
        return self._seconds


class Heard:
    """When each member was last heard, by the reader's ``clock``; one that says the same as before is silent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[Hashable, tuple[Any, float]] = {}

    def hear(self, member: Hashable, beat: Any) -> float:
        """Note the ``beat`` that ``member`` has last given; return for how many seconds it has been the same."""
        now = self._clock()
        if member not in self._last or self._last[member][0] != beat:
            self._last[member] = beat, now
        return now - self._last[member][1]
