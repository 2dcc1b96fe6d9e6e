"""Everything one rank puts into a checkpoint: tensors as parts, the rest as JSON."""

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed.checkpoint.agree import first_to_name, together
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.plain import Collected, Encoded, encode, split
from deepspeed.checkpoint.rng import capture_rng
from deepspeed.checkpoint.save import collect
from deepspeed.checkpoint.save.collect import States, TensorPart
from deepspeed.version import __version__
from deepspeed.zero.client.consolidate import persistent_buffers
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit


@dataclass(frozen=True)
class Extras:
    """What the engine adds to its tensors. ``engine`` is JSON; the others are plain state.

    ``ways``: how many ranks the model is cut over, by the names of the fact ``world`` in docs/checkpoint-format.md.
    """

    tag: str
    engine: dict[str, Any]
    scheduler: Any
    scheduler_type: str | None
    scaler: Any
    data: Any
    config: Any
    client_state: dict[str, Any]
    allow_pickle: bool
    compute_dtype: str
    ways: dict[str, int] = field(default_factory=dict)


@dataclass
class Content:
    """What one rank saves. ``away``: parts that are read from a drive when their turn comes.

    ``hold(hurry)``: from now on those are of this moment, until ``release``; ``hurry`` is called when an update waits.
    ``facts``: this rank's, ``common``: the first rank's for all. ``pickled``: client state to be pickled, by path.
    """

    parts: Iterable[TensorPart] = ()
    away: Iterable[TensorPart] = ()
    hold: Callable[[Callable[[], None]], None] = lambda hurry: None
    release: Callable[[], None] = lambda: None
    facts: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0
    pickled: dict[str, Any] = field(default_factory=dict)


def content_of(states: States, extras: Callable[[], Extras], *, exclude_frozen: bool) -> Content:
    """This rank's content. Collective: ranks compare buffers and client states, and an error of one is raised on all.

    Raises PlainStateError for state that cannot be stored without pickle.
    """
    rank, plain, content = states.mesh.job.index, Collected(), Content()
    buffers = persistent_buffers(states.module)
    adds = rank > 0 and states.mesh.zero.index == 0  # to the common facts; one of the ranks with the same modules
    with together(states.mesh, "collecting the state") as shared:
        gathered = extras()
        content.facts = _rank_facts(states, gathered, plain)
        content.common = _common_facts(states, gathered, plain) if rank == 0 else {}
        extra = _extra_states(states) if adds else {}
        encode(extra, name="extra_state")  # what cannot be stored is an error now
        client, content.pickled = _client_state(gathered, "client_state")
        digest = rank if content.pickled else _digest(client)  # what is pickled is never equal
        digests = {name: crc32c(b.detach().cpu().contiguous()) for name, b in buffers.items()}
        shared.mine = (digest, digests, collect.sites(states), list(collect.extra_modules(states.module)))
    clients, of_buffers, of_sites, extra_paths = zip(*shared.all, strict=True)
    if rank and clients[rank] != clients[0]:
        client, content.pickled = _client_state(gathered, f"ranks/{rank}/client_state")
    if rank == 0 or clients[rank] != clients[0]:
        content.facts["client_state"] = client.json
        plain.tensors |= client.tensors
    if adds:
        first = first_to_name(extra_paths)
        packed = plain.add({p: s for p, s in extra.items() if first[p] == rank}, f"ranks/{rank}/extra_state")
        content.common = {"shared": collect.names_of(states)[1], "extra_state": packed, "groups": states.groups}
    elsewhere = collect.written_elsewhere(states, first_to_name(of_sites))
    without = elsewhere | collect.frozen_names(states) if exclude_frozen else elsewhere
    _add_parts(content, states, _buffer_parts(buffers, of_buffers, rank), elsewhere, without)
    content.parts = itertools.chain(content.parts, (_whole("plain", n, t) for n, t in plain.tensors.items()))
    return content


def _add_parts(
    content: Content, states: States, buffers: Iterator[TensorPart], elsewhere: set[str], without: set[str]
) -> None:
    """Weights, optimizer slots, buffers and gradients, those of a drive apart."""
    reader = collect.StateReader(states)
    near, away = _split_units(states, lambda u: u.on_drive(collect.weights_of(u)[0]))
    _, open_window = _split_units(states, lambda u: u.grad_filled)
    open_near, open_away = _split_units(open_window, lambda u: u.on_drive(StateKind.GRAD))
    content.parts = itertools.chain(
        collect.weight_parts(near, reader, without=without),
        buffers,
        collect.gradient_parts(open_near, reader, without=elsewhere),
        collect.partial_parts(states, without=elsewhere),
    )
    # gradients first: the next backward writes over them, the next update over the rest
    content.away = itertools.chain(
        collect.gradient_parts(open_away, reader, without=elsewhere),
        collect.weight_parts(away, reader, without=without),
    )
    resting = [(u, collect.weights_of(u)[0]) for u in away.units] + [(u, StateKind.GRAD) for u in open_away.units]
    views = [view for unit in away.units for view in states.views_of(unit)]
    content.hold, content.release = functools.partial(reader.hold, resting, views), reader.release
    content.nbytes = collect.nbytes_of(states)


def _split_units(states: States, rule: Callable[[Unit], bool]) -> tuple[States, States]:
    """The same states with the units that fail ``rule``, and with those that pass."""
    no, yes = ([u for u in states.units if rule(u) is answer] for answer in (False, True))
    return replace(states, units=no), replace(states, units=yes)


def _client_state(extras: Extras, name: str) -> tuple[Encoded, dict[str, Any]]:
    """The client state encoded under ``name``, and what of it needs pickle, by path."""
    if extras.allow_pickle:
        return split(extras.client_state, name=name)
    return encode(extras.client_state, name=name), {}


def _digest(client: Encoded) -> list[int]:
    """Equal for equal client states."""
    text = json.dumps(client.json, sort_keys=True)
    return [crc32c(text.encode()), *(crc32c(tensor.contiguous()) for tensor in client.tensors.values())]


def _rank_facts(states: States, extras: Extras, plain: Collected) -> dict[str, Any]:
    """What may differ from rank to rank, as JSON, without the client state."""
    name = f"ranks/{states.mesh.job.index}"
    odd = collect.odd_state(states) if states.optimizer is not None else {}
    return {
        "rng": plain.add(capture_rng(), f"{name}/rng"),
        "data": plain.add(extras.data, f"{name}/data"),
        "scalars": collect.scalar_state(states),
        **({"odd": plain.add(odd, f"{name}/optimizer")} if odd else {}),
    }


def _common_facts(states: States, extras: Extras, plain: Collected) -> dict[str, Any]:
    """What is the same on every rank."""
    saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    world: dict[str, Any] = {"size": states.mesh.job.size, "compute_dtype": extras.compute_dtype}
    if states.mesh.data.size < states.mesh.job.size:
        world["data"] = states.mesh.data.size  # in how many parts the batch is dealt out
    return {
        "saved": {"tag": extras.tag, "time": saved, "deepspeed": __version__, "torch": torch.__version__},
        "world": world | extras.ways,
        "engine": extras.engine,
        "shared": collect.names_of(states)[1],
        "optimizer": _optimizer_facts(states, plain),
        "lr_scheduler": plain.add(extras.scheduler, "lr_scheduler"),
        "lr_scheduler_type": extras.scheduler_type,
        "loss_scaler": plain.add(extras.scaler, "loss_scaler"),
        "extra_state": plain.add(_extra_states(states), "extra_state"),
        # as JSON; what is not JSON in it becomes text
        "config": json.loads(json.dumps(extras.config, default=str, skipkeys=True), parse_constant=str),
    }


def _optimizer_facts(states: States, plain: Collected) -> dict[str, Any] | None:
    if states.optimizer is None:
        return None
    options = [{k: v for k, v in group.items() if k != "params"} for group in states.optimizer.param_groups]
    groups = [
        {"names": names, "options": plain.add(values, f"optimizer/{index}")}
        for index, (names, values) in enumerate(zip(states.groups, options, strict=True))
    ]
    return {"type": type(states.optimizer).__name__, "groups": groups}


def _extra_states(states: States) -> dict[str, Any]:
    """``get_extra_state()`` of the modules that have one, by module path."""
    return {path: module.get_extra_state() for path, module in collect.extra_modules(states.module).items()}


def _buffer_parts(
    buffers: dict[str, torch.Tensor], digests: Sequence[dict[str, int]], rank: int
) -> Iterator[TensorPart]:
    """Each buffer of the first rank that has one of its name, and another rank's where it differs from that."""
    first = first_to_name(digests)
    for name, buffer in buffers.items():
        state = "buffer" if first[name] == rank else f"buffer@{rank}"
        if first[name] == rank or digests[rank][name] != digests[first[name]][name]:
            yield _whole(state, name, buffer)


def _whole(state: str, name: str, tensor: torch.Tensor) -> TensorPart:
    return TensorPart(state, name, tuple(tensor.shape), 0, tensor.detach().contiguous().view(-1))
