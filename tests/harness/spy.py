"""Records every collective that Python code issues through ``torch.distributed``: name, bytes, dtype, group size.

Bytes are those of the full tensor that the collective moves or fills: the output of a gather, the input of a
scatter or reduction. Calls made by torch itself inside another collective are not counted twice.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

# name -> positional indices of the arguments that hold the payload
PAYLOADS = {
    "all_gather_into_tensor": (0,),
    "all_gather_single": (0,),  # torch 2.13's name of the same collective
    "all_gather": (0,),
    "all_reduce": (0,),
    "all_to_all": (1,),
    "all_to_all_single": (1,),
    "broadcast": (0,),
    "gather": (0,),
    "reduce": (0,),
    "reduce_scatter": (1,),
    "reduce_scatter_tensor": (1,),
    "reduce_scatter_single": (1,),
    "scatter": (0,),
    "send": (0,),
    "recv": (0,),
    "isend": (0,),
    "irecv": (0,),
    "barrier": (),
    "all_gather_object": (),
    "broadcast_object_list": (),
}
KEYWORDS = ("output_tensor", "tensor_list", "tensor", "input_list", "input")


@dataclass(frozen=True)
class Call:
    """One collective as this rank issued it."""

    name: str
    nbytes: int
    numel: int
    dtype: torch.dtype | None
    group_size: int


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class CollectiveSpy:
    """Context manager; ``calls`` holds the record, in order of issue."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._replaced = ExitStack()
        self._depth = threading.local()

    def __enter__(self) -> "CollectiveSpy":
        for name in PAYLOADS:
            original = getattr(c10d, name, None)
            if original is None:  # not in this torch
                continue
            wrapped = self._wrap(name, original)
            for module in (m for m in (dist, c10d) if hasattr(m, name)):
                self._replaced.enter_context(mock.patch.object(module, name, wrapped))
        return self

    def __exit__(self, *_: object) -> None:
        self._replaced.close()

    def count(self, name: str | None = None) -> int:
        """Number of calls, of one name or of all."""
        return sum(1 for call in self.calls if name in (None, call.name))

    def nbytes(self, name: str | None = None) -> int:
        """Bytes moved by the calls of one name or of all."""
        return sum(call.nbytes for call in self.calls if name in (None, call.name))

    def dtypes(self, *names: str) -> set[torch.dtype]:
        """The floating dtypes seen by the named collectives (all when none is named); a few scalars do not count."""
        calls = [call for call in self.calls if call.numel > 4 and (not names or call.name in names)]
        return {call.dtype for call in calls if call.dtype is not None and call.dtype.is_floating_point}

    def names(self) -> Counter[str]:
        """How often each collective was issued."""
        return Counter(call.name for call in self.calls)

    def clear(self) -> None:
        """Forget what was recorded."""
        self.calls.clear()

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._depth, "value", 0) == 0:
                self.calls.append(self._record(name, args, kwargs))
            self._depth.value = getattr(self._depth, "value", 0) + 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth.value -= 1

        return wrapper

    @staticmethod
    def _record(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        index = PAYLOADS[name]
        found: list[Tensor] = []
        if index:
            payload = (
                args[index[0]] if len(args) > index[0] else next((kwargs[k] for k in KEYWORDS if k in kwargs), None)
            )
            if name.startswith(("reduce_scatter", "all_to_all")) and len(args) <= index[0]:
                payload = kwargs.get("input", kwargs.get("input_list", kwargs.get("input_tensor_list")))
            found = list(_tensors(payload))
        group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
        return Call(
            name=name,
            nbytes=sum(t.numel() * t.element_size() for t in found),
            numel=sum(t.numel() for t in found),
            dtype=found[0].dtype if found else None,
            group_size=dist.get_world_size(group),
        )
