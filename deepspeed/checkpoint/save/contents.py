"""Everything one rank puts into a checkpoint: tensors as parts, the rest as JSON."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed.checkpoint.agree import first_to_name, together
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.plain import Collected, Encoded, encode, split
from deepspeed.checkpoint.rng import capture_rng
from deepspeed.checkpoint.save.collect import (
    Part,
    States,
    buffer_parts,
    extra_modules,
    extra_states,
    frozen_names,
    gradient_parts,
    names_of,
    nbytes_of,
    odd_state,
    partial_parts,
    places,
    scalar_state,
    weight_parts,
    weights_of,
    written_elsewhere,
)
from deepspeed.checkpoint.save.held import Reader
from deepspeed.checkpoint.save.save import as_json
from deepspeed.checkpoint.save.saver import Content
from deepspeed.version import __version__
from deepspeed.zero.client.consolidate import persistent_buffers
from deepspeed.zero.plan import StateKind
from deepspeed.zero.unit import Unit


@dataclass(frozen=True)
class Extras:
    """What the engine adds to its tensors. ``engine`` is JSON; the others are plain state.

    ``ways``: how many ranks the model is cut over, by the names that docs/checkpoint-format.md has for the fact
    ``world``.
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


def content_of(states: States, extras: Callable[[], Extras], *, exclude_frozen: bool) -> Content:
    """This rank's content. Collective: ranks compare buffers and client states, and an error of one is raised on all.

    Raises PlainStateError for state that cannot be stored without pickle.
    """
    rank = states.mesh.job.index
    plain = Collected()
    content, buffers = Content(()), persistent_buffers(states.module)
    with together(states.mesh, "collecting the state") as shared:
        gathered = extras()
        content.facts = _rank_facts(states, gathered, plain)
        content.common = _common_facts(states, gathered, plain) if rank == 0 else {}
        extra = (
            extra_states(states.module) if rank and states.mesh.zero.index == 0 else {}
        )  # one of ranks with the same modules
        encode(extra, name="extra_state")  # what cannot be stored is an error now
        client = _Client.of(gathered)
        digests = {name: crc32c(b.detach().cpu().contiguous()) if b.numel() else 0 for name, b in buffers.items()}
        shared.mine = (client.digest(), digests, places(states), list(extra_modules(states.module)))
    clients, everyone, placed, extra_paths = zip(*shared.all, strict=True)
    if rank == 0 or clients[rank] != clients[0]:
        content.facts["client_state"] = client.stored(
            plain, "client_state" if rank == 0 else f"ranks/{rank}/client_state"
        )
        content.pickled = client.odd
    if rank and states.mesh.zero.index == 0:
        first = first_to_name(extra_paths)
        content.common = _other_facts(
            states, {path: state for path, state in extra.items() if first[path] == rank}, plain
        )
    reader = Reader(states.optimizer, states.tiles)
    elsewhere = written_elsewhere(states, first_to_name(placed))
    without = elsewhere | frozen_names(states) if exclude_frozen else elsewhere
    near, away = _split_units(states, lambda u: u.on_drive(weights_of(u)[0]))
    _, open_window = _split_units(states, lambda u: u.grad_filled)
    open_near, open_away = _split_units(open_window, lambda u: u.on_drive(StateKind.GRAD))
    content.parts = itertools.chain(
        weight_parts(near, reader, without=without),
        _buffers(buffers, everyone, rank),
        gradient_parts(open_near, reader, without=elsewhere),
        partial_parts(states, without=elsewhere),
        _plain_parts(plain),
    )
    # gradients first: the next backward writes over them, the next update over the rest
    content.away = itertools.chain(
        gradient_parts(open_away, reader, without=elsewhere), weight_parts(away, reader, without=without)
    )
    held = [(u, weights_of(u)[0]) for u in away.units] + [(u, StateKind.GRAD) for u in open_away.units]
    views = [view for unit in away.units for view in states.views_of(unit)]
    content.hold, content.release = functools.partial(reader.hold, held, views), reader.release
    content.nbytes = nbytes_of(states)
    return content


def _split_units(states: States, rule: Callable[[Unit], bool]) -> tuple[States, States]:
    """The same states with the units that fail ``rule``, and with those that pass."""
    no, yes = ([u for u in states.units if rule(u) is answer] for answer in (False, True))
    return replace(states, units=no), replace(states, units=yes)


def _rank_facts(states: States, extras: Extras, plain: Collected) -> dict[str, Any]:
    """What may differ from rank to rank, as JSON, without the client state."""
    rank = states.mesh.job.index
    facts: dict[str, Any] = {
        "rng": plain.add(capture_rng(), f"ranks/{rank}/rng"),
        "data": plain.add(extras.data, f"ranks/{rank}/data"),
    }
    facts["scalars"] = scalar_state(states)
    odd = odd_state(states) if states.optimizer is not None else {}
    if odd:
        facts["odd"] = plain.add(odd, f"ranks/{rank}/optimizer")
    return facts


@dataclass
class _Client:
    """The client state of one rank. ``odd``: what of it needs pickle, by path."""

    state: dict[str, Any]
    encoded: Encoded
    odd: dict[str, Any]

    @classmethod
    def of(cls, extras: Extras) -> "_Client":
        if not extras.allow_pickle:
            return cls(extras.client_state, encode(extras.client_state, name="client_state"), {})
        return cls(extras.client_state, *split(extras.client_state, name="client_state"))

    def digest(self) -> Any:
        """Equal for equal client states; never equal where there is something to pickle."""
        if self.odd:
            return object.__repr__(self)
        return crc32c(as_json(self.encoded.json).encode()), [
            crc32c(t.contiguous()) for t in self.encoded.tensors.values()
        ]

    def stored(self, plain: Collected, name: str) -> Any:
        """Its JSON; tensors go to ``plain`` under ``name``."""
        again, self.odd = split(self.state, name=name)
        plain.tensors |= again.tensors
        return again.json


def _common_facts(states: States, extras: Extras, plain: Collected) -> dict[str, Any]:
    """What is the same on every rank."""
    names = names_of(states)
    return {
        "saved": {
            "tag": extras.tag,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "deepspeed": __version__,
            "torch": torch.__version__,
        },
        "world": {
            "size": states.mesh.job.size,
            "compute_dtype": extras.compute_dtype,
            **_data_ways(states),
            **extras.ways,
        },
        "engine": extras.engine,
        "shared": names.aliases,
        "optimizer": _optimizer_facts(states, plain),
        "lr_scheduler": plain.add(extras.scheduler, "lr_scheduler"),
        "lr_scheduler_type": extras.scheduler_type,
        "loss_scaler": plain.add(extras.scaler, "loss_scaler"),
        "extra_state": plain.add(extra_states(states.module), "extra_state"),
        "config": as_plain_config(extras.config),
    }


def _data_ways(states: States) -> dict[str, int]:
    """In how many parts the batch is dealt out, where these are fewer than the ranks."""
    return {"data": states.mesh.data.size} if states.mesh.data.size < states.mesh.job.size else {}


def _other_facts(states: States, extra: dict[str, Any], plain: Collected) -> dict[str, Any]:
    """What ranks that hold other parameters than the first add to the common facts. ``extra``: states of modules."""
    packed = plain.add(extra, f"ranks/{states.mesh.job.index}/extra_state")
    return {"shared": names_of(states).aliases, "extra_state": packed, "groups": states.groups}


def _optimizer_facts(states: States, plain: Collected) -> dict[str, Any] | None:
    optimizer = states.optimizer
    if optimizer is None:
        return None
    groups = [
        {
            "names": states.groups[index],
            "options": plain.add({k: v for k, v in group.items() if k != "params"}, f"optimizer/{index}"),
        }
        for index, group in enumerate(optimizer.param_groups)
    ]
    return {"type": type(optimizer).__name__, "groups": groups}


def as_plain_config(config: Any) -> Any:
    """The configuration as JSON; what is not JSON in it becomes text."""
    if isinstance(config, dict):
        return {str(k): as_plain_config(v) for k, v in config.items()}
    if isinstance(config, (list, tuple)):
        return [as_plain_config(v) for v in config]
    if isinstance(config, float) and (config != config or config in (float("inf"), float("-inf"))):
        return str(config)
    return config if config is None or isinstance(config, (bool, int, float, str)) else str(config)


def _buffers(buffers: dict[str, torch.Tensor], digests: Sequence[dict[str, int]], rank: int) -> Iterator[Part]:
    """Each buffer of the first rank that has one of its name, and another rank's where it differs from that."""
    first = first_to_name(digests)
    yield from buffer_parts({n: b for n, b in buffers.items() if first[n] == rank}, "buffer")
    others = {n: b for n, b in buffers.items() if digests[rank][n] != digests[first[n]][n]}
    yield from buffer_parts(others, f"buffer@{rank}")


def _plain_parts(plain: Collected) -> Iterator[Part]:
    for name, tensor in plain.tensors.items():
        yield Part("plain", name, tuple(tensor.shape), 0, tensor.detach().contiguous().view(-1))
