"""Taking part in a job that may be stopped, and started again with another number of ranks, at any moment.

[Note: one step for all] A signal reaches ranks at different moments, or one of them only. So no rank acts on it alone:
at each accumulation boundary all tell each other whether they were asked, and the boundary at which one says yes is the
step that all save. A checkpoint has its name when it is whole, so a process that is killed meanwhile leaves none.
"""

import contextlib
import functools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from deepspeed.comm.collectives import gather_objects
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import PreemptedExit, UsageError
from deepspeed.monitor.log import log_dist, logger
from deepspeed.monitor.process_settings import Borrowed

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LAUNCHER_KILLS = "DS_SIGNAL_GRACE_S"  # when a launcher kills its ranks after a signal; it says so in this variable
_FOR_ENDING_S = 1.0  # of that time, what a process needs to end
_STATE = "take_part"  # the key of the client state
_CLOSED = 0  # the number of no signal, which the interpreter never writes


class SavedEngine(Protocol):
    """Interface of the engine that is saved."""

    global_steps: int
    mesh: Mesh
    _checkpoints: Any
    _config: DeepSpeedConfig

    def load_checkpoint(self, load_dir: Any) -> tuple[str | None, Any]: ...
    def save_checkpoint(self, save_dir: Any, *, client_state: Any) -> Any: ...
    def wait_for_checkpoint(self) -> Any: ...


def take_part(engine: SavedEngine, folder: str | os.PathLike[str], *, every: int = 0) -> dict[str, Any]:
    """Go on from the newest complete checkpoint in ``folder``, if there is one, and keep ``engine`` saved there.

    From then on ``engine.step()`` saves every ``every`` updates (0: only when asked). SIGTERM and SIGUSR1 on any rank
    make all ranks save at the same update, within ``checkpoint.emergency_deadline`` seconds, and end with
    ``PreemptedExit`` (status 200). Returns a dict of the program's own, empty at first, which is saved with every
    checkpoint. Collective. Raises UsageError for an empty folder, a negative ``every``, and beside another engine that
    signals save.
    """
    if not str(folder):
        raise UsageError("take_part needs a folder for checkpoints that all ranks share, and got an empty name")
    if every < 0:
        raise UsageError(f"take_part(every={every}): the number of updates between two checkpoints cannot be negative")
    deadline_s, heard_by = engine._config.checkpoint.emergency_deadline, signal.getsignal(SIGNALS[0])
    alone = engine._checkpoints._keeper is not None or not isinstance(getattr(heard_by, "__self__", None), Alarm)
    if deadline_s is not None and not alone:
        raise UsageError(
            "take_part: signals save another engine of this process already, and then end the program. Set "
            "checkpoint.emergency_deadline to null for this one, and save it where the program catches PreemptedExit"
        )
    engine._checkpoints.may_begin = True
    loaded = engine.load_checkpoint(folder)[1] or {}
    state: dict[str, Any] = loaded.get(_STATE, {})
    engine._checkpoints.keep_with(SaveKeeper(engine, folder, every=every, state=state))
    return state


class Alarm:
    """Hear ``SIGNALS`` in this process, also while its main thread is in native code; ``asked`` from the first on.

    ``late(number)`` is called from a thread when ``deadline_s`` seconds have passed without ``close``.
    """

    def __init__(self, deadline_s: float, late: Callable[[int], None]) -> None:
        self.asked = 0  # the signal's number
        self._deadline_s, self._late, self._owner = deadline_s, late, os.getpid()
        self._over = threading.Event()
        self._way_back = contextlib.ExitStack()
        if threading.current_thread() is not threading.main_thread():
            logger.warning("signals do not save a checkpoint, because take_part was not called from the main thread")
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._reader, self._writer = reader, writer
        self._way_back.callback(self._end_watch)  # the last to go: until then the interpreter may write
        # The interpreter writes each signal's number there at once; a handler has to wait for the main thread.
        changes = [Borrowed("signal wakeup", value=writer, read=_wakeup, write=_set_wakeup)]
        for number in SIGNALS:
            read, write = functools.partial(signal.getsignal, number), functools.partial(signal.signal, number)
            changes.append(Borrowed(f"signal {number}", value=self._heard, read=read, write=write))
        for change in changes:
            self._way_back.callback(change.give_back)
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
        threading.Thread(target=self._watch, name="emergency-save", daemon=True).start()

    def _heard(self, number: int, frame: object) -> None:
        self.asked = self.asked or number

    def _watch(self) -> None:
        while data := os.read(self._reader, 64):
            number = next((n for n in data if n in SIGNALS), 0)
            if number and not self._over.is_set():
                self.asked = self.asked or number
                name = signal.Signals(number).name
                os.write(2, f"deepspeed: {name} received; saving a checkpoint within {self._deadline_s:g} s\n".encode())
                if not self._over.wait(self._deadline_s):
                    self._late(number)
            if _CLOSED in data:
                break
        os.close(self._reader)

    def _end_watch(self) -> None:
        with contextlib.suppress(OSError):  # full of signals, and so read soon
            os.write(self._writer, bytes([_CLOSED]))  # a child may still have the writer, so its end is not enough
        os.close(self._writer)

    def disarm(self) -> None:
        """Stop the deadline, as the save has ended in time."""
        self._over.set()

    def close(self) -> None:
        """Give the signals back."""
        if self._owner != os.getpid() or self._over.is_set() and self.asked:
            return  # while ending a second signal must not do what the first one was kept from
        self._over.set()
        if threading.current_thread() is threading.main_thread():
            self._way_back.close()

    def forget(self) -> None:
        """Reset the signals in a child that was forked: they are its own affair, and not this process's."""
        self._way_back.pop_all()
        signal.set_wakeup_fd(-1)
        os.close(self._reader)
        os.close(self._writer)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)


_set_wakeup = functools.partial(signal.set_wakeup_fd, warn_on_full_buffer=False)


def _wakeup() -> int:
    file = signal.set_wakeup_fd(-1)  # there is no other way to ask
    _set_wakeup(file)
    return file


def _forget(alarm: "weakref.ref[Alarm]") -> None:
    referent = alarm()
    if referent is not None and signal.getsignal(SIGNALS[0]) == referent._heard:
        referent.forget()


class SaveKeeper:
    """Save one engine to one folder: every so many updates, and when a signal says that the job is to end."""

    def __init__(
        self, engine: SavedEngine, folder: str | os.PathLike[str], *, every: int, state: dict[str, Any]
    ) -> None:
        self._engine, self._folder, self._every, self._state = weakref.proxy(engine), str(folder), every, state
        self._alarm: Alarm | None = None
        deadline_s = engine._config.checkpoint.emergency_deadline
        if deadline_s is not None:
            grace = os.environ.get(_LAUNCHER_KILLS)
            if grace is not None and float(grace) < deadline_s + _FOR_ENDING_S:
                deadline_s = max(0.5 * float(grace), float(grace) - _FOR_ENDING_S)
            self._alarm = Alarm(deadline_s, self._too_late)
        self.deadline_s = deadline_s  # from the signal to the end of the save; None: signals do not save

    def at_boundary(self) -> None:
        """Save after an update, if due. Collective. Raise PreemptedExit after a save that a rank was asked for."""
        engine, step = self._engine, int(self._engine.global_steps)
        # The group may be the device's alone.
        asked = 0 if self._alarm is None else max(gather_objects(self._alarm.asked, engine.mesh.talk))
        due = self._every > 0 and step % self._every == 0
        if due or asked:
            begun = time.monotonic()
            engine.save_checkpoint(self._folder, client_state={_STATE: self._state})
            if asked:
                log_dist(f"the checkpoint of update {step} took {time.monotonic() - begun:.1f} s")
        if asked and self._alarm is not None:
            engine.wait_for_checkpoint()
            self._alarm.disarm()
            name = signal.Signals(asked).name
            log_dist(f"ending with status {PreemptedExit.exit_status}: update {step} is saved, after {name}")
            raise PreemptedExit(PreemptedExit.exit_status)

    def _too_late(self, number: int) -> None:
        text = f"deepspeed: no checkpoint was finished within {self.deadline_s:g} s of {signal.Signals(number).name}"
        os.write(2, f"{text}; the one before it stays the newest. Ending with status {128 + number}\n".encode())
        os._exit(128 + number)

    def close(self) -> None:
        """Give the signals back; nothing is saved any more."""
        if self._alarm is not None:
            self._alarm.close()
