"""End a script on an error of the configuration or of a call, or Ctrl-C: once, without our frames, but at DEBUG."""

import contextlib
import functools
import io
import logging
import os
import sys
import traceback
import zlib
from types import TracebackType

import torch.distributed as dist

from deepspeed.comm.channel import GONE, job_channel
from deepspeed.comm.collectives import is_of_backend
from deepspeed.comm.hang.explain import CALLS_OF_ALL, RankReport
from deepspeed.comm.hang.stacks import origin
from deepspeed.comm.hang.watch import ended_ranks
from deepspeed.errors import (
    CheckpointError,
    DeepSpeedConfigError,
    NotYetError,
    RankFailedError,
    ReleasedParameterError,
    UsageError,
    counted,
)
from deepspeed.monitor.log import logger

_PLAIN = (DeepSpeedConfigError, UsageError, NotYetError, ReleasedParameterError, CheckpointError)
_FIRST_S = 2.0  # how long others wait for the first rank to say the same


def _of_users(trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` with only the frames of the user."""
    if trace is None:
        return None
    rest = _of_users(trace.tb_next)
    if origin(trace.tb_frame.f_code.co_filename) != "user":
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _handled(error: BaseException) -> BaseException | None:
    """Return what the user's code handled when the call began that raised ``error``, say in a ``finally:``, or None."""
    context = error.__context__  # what is handled inside a call of this package has come to no frame of the user's
    trace = None if context is None else context.__traceback__
    if context is None or (trace is not None and origin(trace.tb_frame.f_code.co_filename) == "user"):
        return context
    return _handled(context)


def _call_of_all(trace: TracebackType | None) -> str:
    """Return the call inside which ``trace`` ends, if it is one of this package that all ranks have to make."""
    codes = (frame.f_code for frame, _ in traceback.walk_tb(trace))
    ours = (code.co_name for code in codes if origin(code.co_filename) == "deepspeed")
    return next((name for name in ours if name in CALLS_OF_ALL and not name.endswith("_batch")), "")


def _of_ended(reports: list[RankReport], call: str = "") -> RankFailedError:
    """Make the error of a rank that has waited for others, which have ended, inside ``call``."""
    texts = []
    for report in reports:
        step = "" if report.step is None else f" after {counted(report.step, 'update')}"
        texts.append(f"rank {report.rank} has ended{step}: {report.error or report.what}")
    text = f"{'; '.join(texts)}. This rank waits for it"
    advice = ". Every rank has to take part in each forward, backward and step: give all of them as many batches"
    if call:
        advice = f" in {call}(). Every rank has to call {call}(), not one alone"
    return RankFailedError(text if any(report.error for report in reports) else text + advice)


def _speaks(error: BaseException) -> bool:
    """Tell whether this rank reports ``error``: the first does, or one that finds the first not to end with it."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return True
    if isinstance(error, KeyboardInterrupt):  # a terminal sends it to all, and nobody waits now
        return dist.get_rank() == 0
    key = str(zlib.crc32(f"{error} {error.__context__}".encode()))
    with contextlib.suppress(*GONE):  # with the first rank, which may have said nothing
        channel = job_channel("deepspeed/said")  # a connection of its own would wait long for a store that is gone
        if dist.get_rank() == 0:
            channel.put(key)
        elif channel.wait(key, seconds=_FIRST_S):
            return False
        else:
            return bool(channel.claim(f"{key}/by", dist.get_rank()) == dist.get_rank())
    return True


@functools.cache
def show_plainly() -> None:
    """Install a hook that reports uncaught errors of this kind plainly; once in a process."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        second = isinstance(error, RankFailedError)  # the launcher has to see that another rank's error says more
        plain, handled = second or isinstance(error, (*_PLAIN, KeyboardInterrupt)), _handled(error)
        if not plain and is_of_backend(error) and (ended := ended_ranks()):
            error, plain = _of_ended(ended, _call_of_all(trace)), True
        if not plain or logger.isEnabledFor(logging.DEBUG):
            previous(kind, error, trace)
            return
        error.__cause__, error.__context__ = None, handled
        error.__suppress_context__ = False
        error.with_traceback(_of_users(trace))
        # The launcher need not say it again, unless what ranks write goes to files.
        error.is_shown = not second and "DS_RANK_LOG" not in os.environ  # type: ignore[attr-defined]
        with contextlib.nullcontext() if _speaks(error) else contextlib.redirect_stderr(io.StringIO()):
            previous(type(error), error, error.__traceback__)

    sys.excepthook = hook
