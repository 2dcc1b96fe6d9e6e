"""What the package's logger says."""

import contextlib
import logging
from collections.abc import Iterator

from deepspeed.monitor.log import logger


@contextlib.contextmanager
def logged(level: int = logging.NOTSET, *, set_level: int | None = None) -> Iterator[list[str]]:
    """The lines of at least ``level`` that are logged inside, where the logger's own level may be another."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    if set_level is not None:
        logger.setLevel(set_level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        if set_level is not None:
            logger.setLevel(before)
