"""The one logger of the package; nothing else writes to the terminal."""

import logging
import os
import sys

logger = logging.getLogger("DeepSpeed")


def _configure() -> None:
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("[%(asctime)s] [%(levelname)s] [deepspeed:%(filename)s:%(lineno)d] %(message)s", "%H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("DS_LOG_LEVEL", "INFO").upper())
    logger.propagate = False


_configure()


def rank() -> int:
    """Global rank as the launcher states it (0 when there is none); no process group is needed."""
    return int(os.environ.get("RANK", "0"))


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO, *, stacklevel: int = 1) -> None:
    """Log ``message`` on the listed global ranks; ``None`` means rank 0 and ``[-1]`` means every rank.

    The line names the caller's place in the code; with a ``stacklevel`` of 2, that of the caller's caller, and so on.
    """
    wanted = [0] if ranks is None else ranks
    if -1 in wanted or rank() in wanted:
        logger.log(level, "[rank %d] %s", rank(), message, stacklevel=stacklevel + 1)
