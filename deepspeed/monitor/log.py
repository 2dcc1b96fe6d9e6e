"""The one logger of the package; nothing else writes to the terminal."""

import contextlib
import functools
import logging
import os
import sys


class _AboveBars(logging.StreamHandler):
    """Write lines above the progress bars that the program has on the terminal, if it uses tqdm."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        shown = getattr(bars, "_instances", None)
        with bars.external_write_mode(self.stream) if bars and shown else contextlib.nullcontext():
            super().emit(record)


logger = logging.getLogger("DeepSpeed")
if not logger.handlers:
    _FORMAT = "[%(asctime)s] [%(levelname)s] [deepspeed:%(filename)s:%(lineno)d] %(message)s"
    logger.addHandler(_AboveBars(sys.stderr))
    logger.handlers[0].setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
    logger.setLevel(os.environ.get("DS_LOG_LEVEL", "INFO").upper())
    logger.propagate = False


def rank() -> int:
    """Return the global rank that the launcher states (0 without a launcher); needs no process group."""
    return int(os.environ.get("RANK", "0"))


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO, *, stacklevel: int = 1) -> None:
    """Log ``message`` on the listed global ranks; ``None`` means rank 0 and ``[-1]`` means every rank.

    The line names the caller's place in the code; with a ``stacklevel`` of 2, that of the caller's caller, and so on.
    """
    wanted = [0] if ranks is None else ranks
    if -1 in wanted or rank() in wanted:
        logger.log(level, "[rank %d] %s", rank(), message, stacklevel=stacklevel + 1)


@functools.lru_cache(maxsize=1024)
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks=None if ranks is None else list(ranks), level=level, stacklevel=3)


def log_dist_once(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Call ``log_dist``, at most once per message."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.lru_cache(maxsize=1024)
def warning_once(message: str) -> None:
    """Warn at most once per message."""
    logger.warning(message, stacklevel=2)


def print_dist(message: str, ranks: list[int] | None = None) -> None:
    """Log ``message`` at INFO, as ``log_dist``."""
    log_dist(message, ranks=ranks, stacklevel=2)


def level_number(name: str) -> int:
    """Return the number of a log level: debug, info, warning, error or critical; ValueError for another name."""
    level = logging.getLevelName(name.upper())
    if not isinstance(level, int):
        raise ValueError(f"{name!r} is no log level; use debug, info, warning, error or critical.")
    return level


def set_log_level_from_string(log_level_str: str) -> None:
    """Set the logger's level by its name; ValueError for an unknown one."""
    logger.setLevel(level_number(log_level_str))
