"""Settings of the whole process that an engine changes while it lives: the logger's level, cyclic garbage collection.

Several engines may live in one process and end in any order. Each change is entered in a list that the process keeps
anyway (the logger's filters, the collector's callbacks), so the order of the changes is known without state of our own:
the newest living change is in force, and when the last one ends the value from before the first is back.
"""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

from deepspeed.observe.log import logger
from deepspeed.observe.log_tools import level_number


def _collect(wanted: object) -> None:
    if wanted:
        gc.enable()
    else:
        gc.disable()


class Borrowed:
    """One change of one process-wide setting, in force until ``give_back``.

    ``registry`` is the process's own list; as a member of it the object is called now and then, and does nothing.
    """

    def __init__(
        self, name: str, *, value: Any, registry: list[Any], read: Callable[[], Any], write: Callable[[Any], None]
    ) -> None:
        self.name = name
        self._registry, self._write = registry, write
        self._before = read()
        registry.append(self)
        write(value)

    def __call__(self, *_: Any) -> bool:
        return True

    def give_back(self) -> None:
        """End this change. Idempotent."""
        changes = [item for item in self._registry if isinstance(item, Borrowed) and item.name == self.name]
        if self not in changes:
            return
        later = changes[changes.index(self) + 1 :]
        self._registry.remove(self)
        if later:
            later[0]._before = self._before
        else:
            self._write(self._before)


def hold_log_level(level: str) -> Borrowed:
    """Set the level of the package's logger ("debug" to "critical") until given back. ValueError for another name."""
    registry: list[Any] = logger.filters
    return Borrowed(
        "log level", value=level_number(level), registry=registry, read=lambda: logger.level, write=logger.setLevel
    )


def hold_collection() -> Borrowed:
    """Switch cyclic garbage collection off until given back; ``gc.collect()`` still works."""
    return Borrowed("collection", value=False, registry=gc.callbacks, read=gc.isenabled, write=_collect)


def hold_settings(undo: contextlib.ExitStack, *, log_level: str | None, no_collection: bool) -> None:
    """Change what an engine asks for; leaving ``undo`` gives it back. ValueError for an unknown level; nothing has
    changed then.
    """
    if log_level is not None:
        undo.callback(hold_log_level(log_level).give_back)
    if no_collection:
        undo.callback(hold_collection().give_back)
