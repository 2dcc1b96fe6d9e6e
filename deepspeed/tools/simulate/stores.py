"""The memory of simulated tensors: none is there, but every storage has a size, a place, an address and an end."""

import bisect
import functools
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from deepspeed.tools.simulate.device import MODULE, NAME
from deepspeed.tools.simulate.events import (
    DEVICE,
    FILE,
    HOST,
    PAGEABLE,
    PINNED,
    REGISTERED,
    Allocate,
    Event,
    Free,
    Site,
    Touch,
)

_PAGE = 4096
_FIRST_ADDRESS = 1 << 56  # no process has memory there
_TORCH = ("/torch/", "/deepspeed/tools/", "/contextlib.py", "/functools.py", "/weakref.py", "<frozen", "<string>")

# (file, function) of this package that allocates -> what for; of a site the first row that fits decides.
CATEGORIES = {
    ("zero/unit.py", "fetch"): "gathered",
    ("zero/unit.py", "adopt"): "states",
    ("tier/store.py", "settled"): "states",
    ("zero/unit.py", "open_grad"): "states",
    ("zero/window.py", "open"): "gradients",
    ("zero/memory/tiers.py", "place"): "states",
    ("zero/build.py", "_values"): "states",  # what stays whole stays in that buffer
    ("zero/gradients.py", "reduce"): "reduction",
    ("zero/gradients.py", "_rest"): "reduction",
    ("zero/gradients.py", "reduce_over_axes"): "reduction",
    ("comm/collectives.py", "reduce_scatter"): "reduction",
    ("optim/base.py", "_moment"): "states",
    ("tier/staging.py", "take"): "staging",
}


@functools.cache
def _place(code: CodeType) -> tuple[str, str] | None:
    """Return the names of file and function; None for torch, the simulator, comprehensions (frames before 3.12)."""
    inside = code.co_name.endswith("comp>") or any(part in code.co_filename for part in _TORCH)
    return None if inside else (code.co_filename.rpartition("/deepspeed/")[2], code.co_name)


def _site(depth: int, frame: FrameType | None) -> Site:
    """Return the innermost frames outside torch and the simulator."""
    places: list[tuple[str, int, str]] = []
    while frame is not None and len(places) < depth:
        if (name := _place(frame.f_code)) is not None:
            places.append((name[0], frame.f_lineno, name[1]))
        frame = frame.f_back
    return tuple(places)


class _Store:
    """Storage with bytes; ``buffer`` names it in events and changes when it is filled anew. A storage that is part of
    ``pages`` begins at byte ``base`` of their buffer, which does not end with it.
    """

    __slots__ = ("address", "base", "buffer", "covered", "nbytes", "pages", "place", "reference")

    def __init__(self, buffer: int, nbytes: int, place: str, reference: Any) -> None:
        self.buffer, self.nbytes, self.place, self.reference = buffer, nbytes, place, reference
        self.address: int | None = None
        self.base, self.pages = 0, None
        self.covered: set[int] = set()


class Stores:
    """Track every storage that was met. Events go to ``emit``; ``phase()``: default purpose; ``host()``: by whom."""

    def __init__(self, emit: Callable[[Event], None], phase: Callable[[], str], host: Callable[[], int]) -> None:
        self._emit, self._phase, self._host = emit, phase, host
        self._stores: dict[int, _Store] = {}
        self._count = 0
        self._addresses: list[tuple[int, _Store]] = []
        self._next_address = _FIRST_ADDRESS
        # What torch has where the recorder puts its own.
        self._resize, self._pointer = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr

    def site(self, depth: int = 3) -> Site:
        """Return where the program is."""
        return _site(depth, sys._getframe(1))

    def touch(self, tensor: torch.Tensor, *, pinned: bool = False) -> Touch:
        """Return the bytes that the tensor spans."""
        store = self.of(tensor, pinned=pinned)
        width, numel = tensor.element_size(), tensor.numel()
        start = store.base + int(tensor.storage_offset()) * width
        if numel and not tensor.is_contiguous():
            numel = 1 + sum(
                int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
        return Touch(store.buffer, start, start + numel * width)

    def file(self) -> int:
        """Return a buffer for the content of a file, whose size nobody counts."""
        self._count += 1
        self._emit(Allocate(self._count, 0, FILE, HOST, "file", self.site()))
        return self._count

    def known(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's storage has been met."""
        return tensor.untyped_storage()._cdata in self._stores

    def of(self, tensor: torch.Tensor, *, pinned: bool = False) -> _Store:
        """Return the storage of a tensor; a storage met for the first time is allocated here and now."""
        storage = tensor.untyped_storage()
        store = self._stores.get(storage._cdata)
        if store is not None and store.nbytes < storage.nbytes():  # ``out=`` and ``resize_`` of a tensor make room
            self._empty(store)
            self._fill(store, storage.nbytes())
        if store is None:
            device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
            place = DEVICE if device.type == NAME else PINNED if pinned else PAGEABLE
            store = self._adopt(storage, place)
        return store

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor lies in page-locked memory."""
        store = self._stores.get(tensor.untyped_storage()._cdata)
        return store is not None and store.place not in (DEVICE, PAGEABLE)

    def _adopt(self, storage: torch.UntypedStorage, place: str) -> _Store:
        key = storage._cdata
        # The C++ owners of a storage keep its weak reference alive: this is its true end.
        store = _Store(0, 0, place, weakref.ref(storage, lambda _: self._gone(key)))
        self._stores[key] = store
        self._fill(store, storage.nbytes())
        return store

    def _fill(self, store: _Store, nbytes: int) -> None:
        self._count += 1
        store.buffer, store.nbytes, store.address, store.covered = self._count, nbytes, None, set()
        stream = MODULE.current_stream().number if store.place == DEVICE else self._host()
        site = self.site(4)
        self._emit(Allocate(store.buffer, nbytes, store.place, stream, self._category(site), site))

    def _category(self, site: Site) -> str:
        for file, _, function in site:
            if (file, function) in CATEGORIES:
                return CATEGORIES[file, function]
            if file.startswith("optim/"):
                return "states" if self._phase() != "step" else "step"
        return self._phase()

    def _empty(self, store: _Store) -> None:
        if store.nbytes and store.pages is None:
            self._emit(Free(store.buffer, frozenset(store.covered), self.site()))
        store.nbytes = 0

    def _gone(self, key: int) -> None:
        store = self._stores.pop(key, None)
        if store is not None:
            self._empty(store)
            store.pages = None  # its address stays known

    def cover(self, tensor: torch.Tensor, stream: int) -> None:
        """Replace ``record_stream``: the allocator waits for that stream before it gives the memory away."""
        self.of(tensor).covered.add(stream)

    # -- pages that tensors are cut from ---------------------------------------------------------------------------
    def map(self, nbytes: int, place: str) -> int:
        """Begin a buffer of that size in host memory, until ``unmap``."""
        self._count += 1
        site = self.site(4)
        self._emit(Allocate(self._count, nbytes, place, HOST, self._category(site), site))
        return self._count

    def unmap(self, buffer: int) -> None:
        self._emit(Free(buffer, frozenset(), self.site()))

    def part(self, tensor: torch.Tensor, pages: Any, start: int) -> None:
        """Place the tensor, new and alone on its storage, at byte ``start`` of ``pages``, and keep them."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        place = REGISTERED if pages.pinned else PAGEABLE
        store = _Store(pages.buffer, storage.nbytes(), place, weakref.ref(storage, lambda _: self._gone(key)))
        store.base, store.pages = start, pages
        self._stores[key] = store

    # -- in the place of torch's methods --------------------------------------------------------------------------
    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        """Replace ``UntypedStorage.resize_``: to nothing and back, which is how units are released and gathered."""
        store = self._stores.get(storage._cdata)
        self._resize(storage, nbytes)
        if store is not None and nbytes != store.nbytes:
            self._empty(store)
            if nbytes:
                self._fill(store, nbytes)
        return storage

    def storage_pointer(self, storage: torch.UntypedStorage) -> int:
        """Replace ``UntypedStorage.data_ptr``: a simulated storage has an address that nothing else has."""
        store = self._stores.get(storage._cdata)
        return self._pointer(storage) if store is None else self._address(store)

    def pointer(self, tensor: torch.Tensor) -> int:
        """Replace ``FakeTensor.data_ptr``."""
        return self._address(self.of(tensor)) + int(tensor.storage_offset()) * tensor.element_size()

    def _address(self, store: _Store) -> int:
        if store.address is None:
            store.address = self._next_address
            self._next_address += (store.nbytes // _PAGE + 2) * _PAGE
            self._addresses.append((store.address, store))
        return store.address

    def at(self, address: int, nbytes: int) -> Touch:
        """Return the bytes behind an address that a native kernel is given."""
        start, store = self._addresses[bisect.bisect_right(self._addresses, address, key=lambda entry: entry[0]) - 1]
        assert store.address == start and address + nbytes <= start + store.nbytes, "a kernel is given a stale address"
        first = store.base + address - start
        return Touch(store.buffer, first, first + nbytes)
