"""Settings of the whole process that engines change while they live: the logger's level, garbage collection, signals.

Engines may end in any order: the newest living change is in force, and in the end the value from before the first.
"""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

from deepspeed.monitor.log import level_number, logger

# The living changes, oldest first. The settings are the process's, and so is the order in which they were changed.
_LIVING: "list[Borrowed]" = []


class Borrowed:
    """Change the process-wide setting ``name`` until ``give_back``."""

    def __init__(self, name: str, *, value: Any, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.name, self._write, self._before = name, write, read()
        _LIVING.append(self)
        write(value)

    def give_back(self) -> None:
        """End this change. Idempotent."""
        if self not in _LIVING:
            return
        later = [change for change in _LIVING[_LIVING.index(self) + 1 :] if change.name == self.name]
        _LIVING.remove(self)
        if later:
            later[0]._before = self._before
        else:
            self._write(self._before)


def hold_settings(undo: contextlib.ExitStack, *, log_level: str | None, no_collection: bool) -> None:
    """Change the settings that an engine asks for until ``undo`` is left. ValueError for an unknown level."""
    if log_level is not None:
        level = level_number(log_level)
        undo.callback(Borrowed("log level", value=level, read=lambda: logger.level, write=logger.setLevel).give_back)
    if no_collection:
        switch = {True: gc.enable, False: gc.disable}
        change = Borrowed("collection", value=False, read=gc.isenabled, write=lambda on: switch[on]())
        undo.callback(change.give_back)
