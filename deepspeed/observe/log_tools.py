"""Rarely needed companions of the logger that clients import."""

import functools
import logging

from deepspeed.observe.log import log_dist, logger


@functools.lru_cache(maxsize=1024)
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks=None if ranks is None else list(ranks), level=level, stacklevel=3)


def log_dist_once(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """``log_dist``, at most once per message."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.lru_cache(maxsize=1024)
def warning_once(message: str) -> None:
    """Warn at most once per message."""
    logger.warning(message, stacklevel=2)


def print_dist(message: str, ranks: list[int] | None = None) -> None:
    """``log_dist`` at INFO."""
    log_dist(message, ranks=ranks, stacklevel=2)


def level_number(name: str) -> int:
    """The number of a level's name: debug, info, warning, error or critical; ValueError otherwise."""
    level = logging.getLevelName(name.upper())
    if not isinstance(level, int):
        raise ValueError(f"{name!r} is no log level; use debug, info, warning, error or critical.")
    return level


def set_log_level_from_string(log_level_str: str) -> None:
    """Set the logger's level by its name; ValueError for an unknown one."""
    logger.setLevel(level_number(log_level_str))
