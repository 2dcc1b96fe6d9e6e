"""Where a thread of this process is, read by another one: what it waits for, in which module, at whose line.

Nothing is recorded for this while the program runs. The one thing that other layers contribute is a method
``waits_for()`` of an object whose methods wait: it says in words for what, and is called from outside.
"""

import functools
import itertools
import linecache
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_SITE = f"{os.sep}site-packages{os.sep}"
_DEVICE = _OURS + os.path.join("accelerator", "device.py")
COLLECTIVE, DRIVE, LOADER = "collective", "drive", "loader"
WATCHERS = "ds-hang"  # how the names of the threads begin that look
# Calls that wait for the device, on which a collective may be.
DEVICE_WAITS = re.compile(r"\.(item|tolist|cpu|numpy|synchronize)\(")
# Errors that are no failure while they are handled.
_HARMLESS = (StopIteration, StopAsyncIteration, GeneratorExit)
_STARTS = ("<module>", "_run_module_as_main", "_bootstrap")  # outermost functions of scripts and threads that run
_SHOWN_FRAMES = 12
_MOST_CHARACTERS = 8000  # of a traceback, from its end


@dataclass(frozen=True)
class Spot:
    """Place of a thread. ``kind``: COLLECTIVE, DRIVE, LOADER, or "" while it runs; ``waits``: for what, in words.

    ``unit``: the unit whose memory moves; ``group``: torch's name of the group that is waited on, None if unknown;
    ``call``: this package's function that the user called. ``line``: of the innermost frame that is neither torch's,
    Python's nor this package's. ``ends``: the script has ended. ``mark`` differs between two waits of the same words.
    """

    kind: str = ""
    waits: str = ""
    unit: str = ""
    module: str = ""
    line: str = ""
    group: str | None = None
    call: str = ""
    ends: bool = False
    mark: str = ""
    stack: tuple[str, ...] = field(default=(), repr=False)


class Failure(NamedTuple):
    """Error of a thread: its line of text, the module and the line that raised it, and its traceback."""

    text: str = ""
    module: str = ""
    line: str = ""
    trace: str = ""


@functools.lru_cache(maxsize=4096)
def origin(file: str) -> str:
    """Return whose code a file is: "deepspeed", "torch", "python" or "user"."""
    if file.startswith(_OURS):
        return "deepspeed"
    if file.startswith(_TORCH):
        return "torch"
    return "python" if file.startswith("<") or (file.startswith(_PYTHON) and _SITE not in file) else "user"


def number_of(frame: FrameType) -> int:
    """Return the line of ``frame``, or the first of its function: a frame that moves meanwhile may have none."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def line_of(code: CodeType, number: int) -> str:
    """Format a line as ``train.py:41 in evaluate``; for installed packages with the folder."""
    parts = code.co_filename.split(_SITE)
    name = parts[-1] if len(parts) > 1 else os.path.basename(parts[-1])
    return f"{name}:{number}" + ("" if code.co_name == "<module>" else f" in {code.co_name}")


def group_title(group: Any) -> str:
    """Return torch's name of a process group, which is the same on all ranks; "default" for the group of all."""
    return "default" if group is dist.group.WORLD else str(getattr(group, "group_name", ""))


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield ``frame`` and the frames that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _described(tensor: Any) -> str:
    first = tensor[0] if isinstance(tensor, (list, tuple)) and tensor else tensor
    if not isinstance(first, torch.Tensor):
        return ""
    many = f"{len(tensor)} times " if first is not tensor else ""
    return f" of {many}{'x'.join(map(str, first.shape)) or '1'} {str(first.dtype).removeprefix('torch.')}"


def _torch_call(frames: list[FrameType]) -> tuple[str, str | None] | None:
    """Return the torch.distributed function of the innermost frames with its tensor, and its group; or None."""
    call: FrameType | None = None
    for frame in frames:
        if not frame.f_code.co_filename.startswith(os.path.join(_TORCH, "distributed") + os.sep):
            break
        if frame.f_code.co_filename.endswith("distributed_c10d.py"):
            call = frame
    if call is None:
        return None
    local = call.f_locals
    names = ("tensor", "output_tensor", "output", "tensor_list", "output_tensor_list", "output_tensors")
    moved = next((text for name in names if (text := _described(local.get(name)))), "")
    return call.f_code.co_name + moved, group_title(local.get("group") or dist.group.WORLD) or None


def _waiting_text(frame: FrameType) -> str:
    """Return the source text of the instruction at which ``frame`` is."""
    positions: Any = getattr(frame.f_code, "co_positions", tuple)()  # from Python 3.11 on
    start, end, start_col, end_col = next(itertools.islice(positions, max(0, frame.f_lasti) // 2, None), (None,) * 4)
    if start is None or start != end:
        return linecache.getline(frame.f_code.co_filename, number_of(frame)).strip()
    return linecache.getline(frame.f_code.co_filename, start).encode()[start_col:end_col].decode(errors="replace")


def _work_waited_for(frame: FrameType) -> bool:
    """Return whether a client's frame waits for a torch Work."""
    receiver, call, _ = _waiting_text(frame).rpartition(".wait(")
    value = frame.f_locals.get(receiver, frame.f_globals.get(receiver)) if receiver.isidentifier() else None
    return bool(call) and (isinstance(value, dist.Work) or (value is None and "work" in receiver.lower()))


def _device_waited_for(frames: list[FrameType], *, busy: bool) -> str:
    """Return the call by which a client's frame, or with ``busy`` one of ours, waits for the device; else ""."""
    files = ((frame, frame.f_code.co_filename) for frame in frames)
    caller = next((frame for frame, file in files if origin(file) != "torch" and file != _DEVICE), None)
    text = "" if caller is None else _waiting_text(caller)
    if caller is None or not DEVICE_WAITS.search(text):
        return ""
    by_owner = {"deepspeed": busy, "user": torch.accelerator.is_available()}
    return text if by_owner.get(origin(caller.f_code.co_filename)) else ""


def _loader(frames: list[FrameType]) -> tuple[str, str] | None:
    """Return the wait for workers of a torch data loader, in words, and a mark of its progress; or None."""
    for frame in frames:
        if not frame.f_code.co_filename.endswith(os.path.join("utils", "data", "dataloader.py")):
            continue
        loader = frame.f_locals.get("self")
        workers = getattr(loader, "_workers", None)
        if not workers:
            return None  # the dataset's code runs on this thread: a line like any
        states = [f"worker {i} (pid {w.pid}) {process_state(w.pid)}" for i, w in enumerate(workers)]
        return f"a batch of its data loader: {', '.join(states)}", str(getattr(loader, "_rcvd_idx", ""))
    return None


def process_state(pid: int) -> str:
    """Return what /proc says of a process: "is stopped", "has ended", "waits in the kernel", "runs or sleeps"."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "has ended"
    words = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": "has ended", "X": "has ended"}
    return words.get(letter, "waits in the kernel (state D)" if letter == "D" else "runs or sleeps")


def _own_wait(frames: list[FrameType]) -> tuple[str, str, str | None, str] | None:
    """Return the wait of this package's frames (kind, what for, torch's name of the group, a mark), or None."""
    for frame in frames:
        file = frame.f_code.co_filename
        owner = origin(file)
        if owner == "user":
            return None
        if owner != "deepspeed":
            continue
        where = file.removeprefix(_OURS).split(os.sep)[0]
        holder: Any = frame.f_locals.get("self")
        if where == "tier" and hasattr(holder, "waits_for"):
            text = holder.waits_for()
            return DRIVE, text, None, text
        if where == "comm":
            group = getattr(frame.f_locals.get("group"), "pg", None)
            return COLLECTIVE, frame.f_code.co_name, group_title(group) if group else None, ""
    return None


def _wait(frames: list[FrameType], *, busy: bool) -> tuple[str, str, str | None, str]:
    if (wait := _own_wait(frames)) is not None:
        kind, text, group, mark = wait
        inner = _torch_call(frames)
        if inner is not None and kind == COLLECTIVE:
            text, group = inner[0] if text in ("call", "sum_in_place", "broadcast") else text, group or inner[1]
        asked = [f.f_locals["self"].waits_for() for f in frames if _asks(f)]
        return kind, asked[0] if asked and kind == COLLECTIVE else text, group, mark
    if (called := _torch_call(frames)) is not None:
        return COLLECTIVE, called[0], called[1], ""
    if (loader := _loader(frames)) is not None:
        return LOADER, loader[0], None, loader[1]
    if text := _device_waited_for(frames, busy=busy):
        return COLLECTIVE, text, None, ""
    if frames and origin(frames[0].f_code.co_filename) == "user" and _work_waited_for(frames[0]):
        return COLLECTIVE, _waiting_text(frames[0]), None, ""
    return "", "", None, ""


def _asks(frame: FrameType) -> bool:
    """Return whether ``frame`` is in a message between the ranks about what comes next."""
    return frame.f_code.co_name == "_message" and hasattr(frame.f_locals.get("self"), "waits_for")


def unit_of(frame: FrameType) -> str:
    """Return the title of the unit that a frame of this package works on; "" for any other frame."""
    names = frame.f_code.co_varnames
    name = "unit" if "unit" in names else "self" if "self" in names[:1] else ""
    if not name or origin(frame.f_code.co_filename) != "deepspeed":
        return ""
    title = getattr(frame.f_locals.get(name), "title", "")
    return title if isinstance(title, str) else ""


def _module_of(frame: FrameType, modules: Mapping[int, str]) -> str:
    module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
    return modules.get(id(module), type(module).__name__) if isinstance(module, torch.nn.Module) else ""


def spot_of(frames: list[FrameType], modules: Mapping[int, str], *, whole: bool = False, busy: bool = False) -> Spot:
    """Return the place of the thread with these ``frames``, the innermost first; ``whole`` adds its stack, as text.

    ``modules``: names by the ids of modules. ``busy``: a device may have a collective of ours that has not ended.
    """
    kind, waits, group, mark = _wait(frames, busy=busy)
    users = [frame for frame in frames if origin(frame.f_code.co_filename) == "user"]
    line = line_of(users[0].f_code, number_of(users[0])) if users else ""
    client = next((f for f in users if _SITE not in f.f_code.co_filename), None)
    if client is not None and client is not users[0]:
        line += f", called from {line_of(client.f_code, number_of(client))}"
    inside = frames[: frames.index(users[0])] if users else []
    ours = [f.f_code.co_name for f in reversed(inside or frames) if origin(f.f_code.co_filename) == "deepspeed"]
    shown = list[str]()
    if whole:  # the user's frames, and one line of the package's
        shown = traceback.StackSummary.extract((f, number_of(f)) for f in reversed(users[:_SHOWN_FRAMES])).format()
        shown += [f"  inside deepspeed: {', '.join(ours)}\n"] if ours else []
    asks = any(map(_asks, frames))  # its words name the unit
    return Spot(
        *(kind, waits),
        next((text for frame in frames if not asks and (text := unit_of(frame))), ""),
        next((name for frame in frames if (name := _module_of(frame, modules))), ""),
        *(line, group),
        call=ours[0] if ours and inside else "",
        ends=not frames or frames[-1].f_code.co_name not in _STARTS,
        mark=f"{kind} {waits} {mark}",
        stack=tuple(shown),
    )


def spots(thread: int, modules: Mapping[int, str], *, whole: bool = False, busy: bool = False) -> Spot:
    """Return the place of ``thread``, or of a thread on which autograd works for it and waits."""
    current, names = sys._current_frames(), {t.ident: t.name for t in threading.enumerate()}
    if thread != threading.get_ident():  # this frame would hold itself, and all frames' tensors until a collection
        del current[threading.get_ident()]
    stack = list(outwards(current.get(thread)))
    spot = spot_of(stack, modules, whole=whole, busy=busy)
    if spot.kind or not any("autograd" in frame.f_code.co_filename for frame in stack[:3]):
        return spot
    for other, frame in current.items():
        frames = list(outwards(frame))
        if other == thread or other in names and names[other].startswith(WATCHERS):
            continue
        inner = spot_of(frames, modules, whole=whole, busy=busy)
        if inner.kind and any(origin(f.f_code.co_filename) == "deepspeed" for f in frames):
            return Spot(inner.kind, inner.waits, inner.unit, inner.module, spot.line, inner.group, mark=inner.mark)
    return spot


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and its causes up to the first, as a traceback shows them, so not what ``from None`` hides."""
    following: BaseException | None = error
    seen = set[int]()  # ``raise error.__cause__ from error`` makes a ring
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        shown = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ if following.__cause__ is not None else shown


def _message(error: BaseException) -> str:
    """Return the words of an error; none where its own ``__str__`` fails, as code of the user's may."""
    try:
        return str(error).strip()
    except Exception:  # whatever it raises, the watch goes on
        return ""


def failure_of(thread: int, modules: Mapping[int, str], *, ends: bool) -> Failure:
    """Return the error that ``thread`` has raised and still handles, or that ended its script when that ``ends``."""
    active: Any = sys._current_exceptions().get(thread)
    error = active[1] if isinstance(active, tuple) else active
    if error is None and ends:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, BaseException) or isinstance(error, _HARMLESS):
        return Failure()
    chain = [*_chain(error)]
    first = chain[-1]
    passed = list(traceback.walk_tb(first.__traceback__))
    users = [(f.f_code, number) for f, number in passed if origin(f.f_code.co_filename) == "user"]
    names = [name for frame, _ in passed if (name := _module_of(frame, modules))]
    # The first has no words where it is queue.Empty, say, of which a loader's error tells more.
    telling = next((e for e in reversed(chain) if _message(e)), first)
    head = _message(telling).partition("\n")[0]
    text = "".join(traceback.format_exception(error))[-_MOST_CHARACTERS:]
    sentence = f"{type(telling).__name__}: {head}" if head else type(telling).__name__
    return Failure(sentence, names[-1] if names else "", line_of(*users[-1]) if users else "", text)
