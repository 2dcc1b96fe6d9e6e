"""Everything one rank puts into a checkpoint, and how it stays as it was at the save while training goes on.

What is on a drive is read there, before an update may write over it; what is in memory is copied.
"""

import functools
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from deepspeed.accelerator.device import get_accelerator
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.plain import Collected, encode
from deepspeed.checkpoint.save import collect
from deepspeed.checkpoint.save.collect import Elements, States, TensorPart
from deepspeed.errors import CheckpointError
from deepspeed.tier.arena import ALIGN, Arena, aligned_empty
from deepspeed.tier.drive import Held
from deepspeed.version import __version__
from deepspeed.zero.module.state import persistent_buffers
from deepspeed.zero.sync.failures import together

_LINE = 64  # bytes: where a copy begins
_Named = TypeVar("_Named", bound=Hashable)


@dataclass
class Content:
    """Content that one rank saves. Parts from ``collect`` refer to live memory: copy them before training goes on.

    ``facts``: this rank's, ``common``: the first rank's for all. ``pickled``: client state to be pickled, by path.
    """

    collect: Callable[[], Iterable[TensorPart]] = tuple
    facts: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    pickled: dict[str, Any] = field(default_factory=dict)
    _holds: dict[int, Held] = field(default_factory=dict)

    @functools.cached_property
    def parts(self) -> list[TensorPart]:
        return list(self.collect())

    @property
    def nbytes(self) -> int:
        return sum(part.values.nbytes for part in self.parts)

    def hold(self, hurry: Callable[[], None] = lambda: None) -> None:
        """Hold data on drives as it is now, for the reads; an update that waits for the reads calls ``hurry``."""
        for store in (part.elements.store for part in self.parts):
            if store is not None and id(store) not in self._holds:
                self._holds[id(store)] = store.hold(hurry)

    def release(self) -> None:
        """Release the drives; nothing more can be read. Also after an error, when a reader has stopped half way."""
        for hold in self._holds.values():
            hold.release()

    def away(self) -> Iterator[TensorPart]:
        """Yield the parts on drives, each valid until the next; a store is released once its parts are read."""
        buffer = torch.empty(0, dtype=torch.uint8)
        # gradients first: the next backward writes over them, the next update over the rest
        parts = sorted((p for p in self.parts if p.elements.store is not None), key=lambda p: p.state != "grad")
        for store, of_store in itertools.groupby(parts, key=lambda p: id(p.elements.store)):
            for part in of_store:
                start, nbytes = part.elements.start, part.values.nbytes
                shift = start % ALIGN  # as in the file, so that whole pages can bypass the page cache
                if buffer.numel() < shift + nbytes:
                    buffer = torch.empty(0, dtype=torch.uint8)  # before the larger one is there
                    buffer = aligned_empty(-(-(shift + nbytes) // ALIGN) * ALIGN)
                inside = buffer[shift : shift + nbytes]
                self._holds[store].read(start, inside)
                yield replace(part, elements=Elements(inside.view(part.values.dtype)))
            self._holds[store].release()


def first_to_name(of_ranks: Iterable[Iterable[_Named]]) -> dict[_Named, int]:
    """Return the first rank, by its number in the job, that names each item."""
    pairs = [(name, rank) for rank, names in enumerate(of_ranks) for name in names]
    return dict(reversed(pairs))


def content_of(
    states: States, given: Callable[[], dict[str, Any]], *, exclude_frozen: bool, allow_pickle: bool = False
) -> Content:
    """Collect this rank's content, with the facts ``given``. Collective; PlainStateError for what needs pickle."""
    rank, plain, content = states.mesh.job.index, Collected(), Content()
    buffers = persistent_buffers(states.module, pieces=not exclude_frozen)
    buffers = {n: b.detach().resolve_conj().resolve_neg() for n, b in buffers.items()}
    adds = rank > 0 and any(u.mesh.zero.index == 0 for u in states.units)  # to the common facts, with names of its own
    speaks = states.mesh.pp.size > 1 and states.mesh.zero.index == states.mesh.tp.index == 0  # for its pipeline stage
    with together(states.mesh, "collecting the state") as shared:
        facts = given()
        name, odd = f"ranks/{rank}", collect.odd_state(states)
        content.facts = {
            "rng": plain.add(capture_rng(), f"{name}/rng"),
            "data": plain.add(facts["data"], f"{name}/data"),
            "scalars": collect.scalar_state(states),
            **({"odd": plain.add(odd, f"{name}/optimizer")} if odd else {}),
        }
        content.common = _common_facts(states, facts, plain) if rank == 0 else {}
        if speaks and states.optimizer is not None:  # groups of another stage may be others
            pairs = zip(states.groups, states.optimizer.param_groups, strict=True)
            rows, schedule = collect.group_rows(pairs, plain, f"{name}/groups"), facts["lr_scheduler"]
            content.facts["stage"] = {"groups": rows, "lr_scheduler": plain.add(schedule, f"{name}/lr_scheduler")}
        extra = _extra_states(states) if adds else {}
        Collected().add(extra, "extra_state")  # what cannot be stored is an error now
        client = encode(facts["client_state"], name="client_state", allow_rest=allow_pickle)
        text = json.dumps(client.json, sort_keys=True).encode()
        digest = rank if client.rest else [crc32c(text), *map(crc32c, client.tensors.values())]  # pickled: never equal
        digests = {name: crc32c(b.cpu().contiguous()) for name, b in buffers.items()}
        shared.mine = (digest, digests, collect.sites(states), list(collect.extra_modules(states.module)))
    clients, of_buffers, of_sites, extra_paths = zip(*shared.all, strict=True)
    if rank and clients[rank] != clients[0]:
        client = encode(facts["client_state"], name=f"{name}/client_state", allow_rest=allow_pickle)
    content.pickled = client.rest
    if rank == 0 or clients[rank] != clients[0]:
        content.facts["client_state"] = client.json
        plain.tensors |= client.tensors
    if adds:
        first = first_to_name(extra_paths)
        packed = plain.add({p: s for p, s in extra.items() if first[p] == rank}, f"{name}/extra_state")
        content.common = {"shared": collect.names_of(states)[1], "extra_state": packed, "groups": states.groups}
    elsewhere = collect.written_elsewhere(states, first_to_name(of_sites))
    without = elsewhere | collect.frozen_names(states) if exclude_frozen else elsewhere

    def parts() -> Iterator[TensorPart]:
        yield from collect.weight_parts(states, without=without)
        yield from _buffer_parts(buffers, of_buffers, rank)
        yield from collect.gradient_parts(states, without=elsewhere)
        for name, tensor in plain.tensors.items():
            yield _whole("plain", name, tensor)

    content.collect = parts
    return content


def _buffer_parts(
    buffers: dict[str, torch.Tensor], digests: Sequence[dict[str, int]], rank: int
) -> Iterator[TensorPart]:
    """Yield the buffers of ``rank`` that no earlier rank has, and those that differ from the first owner's."""
    first = first_to_name(digests)
    for name, buffer in buffers.items():
        if first[name] == rank:
            yield _whole("buffer", name, buffer)
        elif digests[rank][name] != digests[first[name]][name]:
            yield _whole(f"buffer@{rank}", name, buffer)


def _common_facts(states: States, given: dict[str, Any], plain: Collected) -> dict[str, Any]:
    """Return the facts that are the same on every rank."""
    saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    world, optimizer = {"size": states.mesh.job.size, **given["world"]}, None
    if states.mesh.data.size < states.mesh.job.size:
        world["data"] = states.mesh.data.size  # in how many parts the batch is dealt out
    if states.optimizer is not None:
        groups = zip(states.groups, states.optimizer.param_groups, strict=True)
        optimizer = {"type": type(states.optimizer).__name__, "groups": collect.group_rows(groups, plain, "optimizer")}
    return {
        "saved": {"tag": given["tag"], "time": saved, "deepspeed": __version__, "torch": torch.__version__},
        "world": world,
        "engine": given["engine"],
        "shared": collect.names_of(states)[1],
        "optimizer": optimizer,
        "lr_scheduler": plain.add(given["lr_scheduler"], "lr_scheduler"),
        "lr_scheduler_type": given["lr_scheduler_type"],
        "loss_scaler": plain.add(given["loss_scaler"], "loss_scaler"),
        "extra_state": plain.add(_extra_states(states), "extra_state"),
        # as JSON; what is not JSON in it becomes text
        "config": json.loads(json.dumps(given["config"], default=str, skipkeys=True), parse_constant=str),
    }


def _extra_states(states: States) -> dict[str, Any]:
    """Return ``get_extra_state()`` of the modules that define one, by module path."""
    return {path: module.get_extra_state() for path, module in collect.extra_modules(states.module).items()}


def _whole(state: str, name: str, tensor: torch.Tensor) -> TensorPart:
    return TensorPart(state, name, tuple(tensor.shape), 0, Elements(tensor.detach()))


class Copies:
    """Copies of one rank's parts, in memory of ``arena`` that is kept: mapping new memory takes longer than the copy.

    Host tensors are copied at once. Device tensors are copied asynchronously: state that only the engine's update
    writes, on a side stream, beside forward and backward until ``before_update``; all that others may write, on the
    compute stream, ahead of later writes.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._stream: Any = None
        self._event: Any = None  # of all copies on their way
        self._reading: list[tuple[torch.Tensor, int]] = []  # what they read beside the compute, and its version
        self._mutex, self._touched = threading.Lock(), False

    def take(self, parts: list[TensorPart]) -> list[TensorPart]:
        """Copy ``parts``; the copies are valid until the next call, and complete after ``arrive``."""
        if self._event is not None:
            self._event.synchronize()  # of a save that failed before it looked
        accelerator, copies, beside = get_accelerator(), [], list[tuple[torch.Tensor, torch.Tensor]]()
        for part, target in zip(parts, self._targets(parts), strict=True):
            values, on_host = part.values, part.values.device.type == "cpu"
            if part.quiet and not on_host:
                beside.append((target, values))
            else:
                target.copy_(values.reshape(-1), non_blocking=not on_host)
            copies.append(replace(part, elements=Elements(target)))
        self._touched, self._reading = False, [(values, values._version) for _, values in beside]
        self._stream = self._stream or accelerator.Stream()
        self._stream.wait_stream(accelerator.current_stream())
        try:
            with accelerator.stream(self._stream):
                for target, values in beside:
                    target.copy_(values.reshape(-1), non_blocking=True)
        finally:  # one that failed half way has copies on their way too
            self._event = accelerator.awaited_event()
            self._event.record(self._stream)
        return copies

    def _targets(self, parts: list[TensorPart]) -> Iterator[torch.Tensor]:
        ends = list(itertools.accumulate(-(-part.values.nbytes // _LINE) * _LINE for part in parts))
        if parts and not ends[-1] <= self._slab.numel() <= 2 * ends[-1]:
            self._slab = torch.empty(0, dtype=torch.uint8)  # before the larger one is there
            self._slab = self._arena.empty(ends[-1], pin=True)
        for part, start in zip(parts, [0, *ends], strict=False):
            yield self._slab[start : start + part.values.nbytes].view(part.values.dtype)

    def before_update(self) -> None:
        """Make the compute stream wait for copies that still read: the engine is about to write their sources."""
        if self._reading:
            get_accelerator().current_stream().wait_event(self._event)
            self._let_go()

    def arrive(self) -> None:
        """Wait until the copies are complete; any thread. CheckpointError if others have written the sources."""
        self._event.synchronize()
        self._let_go()
        if self._touched:
            raise CheckpointError(
                "masters or optimizer state on the device were written by hand while a save in the background copied "
                "them; call wait_for_checkpoint() first, or write them with safe_set_full_fp32_param and the like"
            )

    def _let_go(self) -> None:
        with self._mutex:
            self._touched |= any(values._version != version for values, version in self._reading)
            self._reading = []


def capture_rng() -> dict[str, Any]:
    """Capture the state of Python's, numpy's (global) and torch's generators, and of the device's if there is one."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    counts = {"position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)}
    state: dict[str, Any] = {
        "python": {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "numpy": {"kind": str(kind), "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)), **counts},
        "torch": torch.get_rng_state(),
    }
    if get_accelerator().device_name() != "cpu":
        state["device"] = get_accelerator().get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore the state of ``capture_rng``; a device state is ignored where there is no device."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if "device" in state and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(state["device"])
