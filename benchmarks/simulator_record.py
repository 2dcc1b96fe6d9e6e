"""Published rows, and what the engine does in a step of each: the events of its last micro-batches, kept small.

A recording does not depend on the machine. Rows without published memory are recorded with ``DEPTHS`` blocks: what one
more block takes is their difference. ``data/recordings.json.xz`` has all of them.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import lzma
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from deepspeed.tools.simulate import models, run
from deepspeed.tools.simulate.costs import Machine, load_machine, machines
from deepspeed.tools.simulate.events import COMPUTE, Event, HostWait, Launch, Phase, Record, Talk, Wait, Work
from deepspeed.tools.simulate.models import Shape, Subject, decoder_subject
from deepspeed.tools.simulate.order import OrderCheck
from deepspeed.tools.simulate.run import RankJob
from deepspeed.zero import runtime

HERE = Path(__file__).parent
DATA = HERE / "data"
PACKED = DATA / "recordings.json.xz"
CACHE = HERE.parent / ".bench/simulator"
STEPS = {1: 3, 2: 2}  # the schedule is known after two micro-batches
DEPTHS = (3, 5)

_SHAPE = ("layers", "hidden", "heads", "key_heads", "ffn", "vocab", "gated", "tied")
_RUN = ("sequence", "micro_batch", "recompute", "gpus")
# What only some rows say, and what the others have.
_ALSO = {
    "zero": 3, "tensor": 1, "group": 0, "optimizer_on_host": False, "attention": "fused", "sequence_parallel": False,
}  # fmt: skip


@functools.cache
def published() -> dict[str, Any]:
    """``rows``: steps; ``rates``: of collectives and products; ``left_out``: rows by the reason why."""
    document: dict[str, Any] = json.loads((DATA / "published_steps.json").read_text())
    return document


def rows_of(tables: Sequence[str] | None = None) -> list[dict[str, Any]]:
    return [row for row in published()["rows"] if not tables or row["table"] in tables]


def machine_of(name: str) -> Machine:
    """One of the package, or one that only a published table has."""
    return load_machine(name if name in machines() else str(DATA / f"{name}.json"))


def keys_of(row: dict[str, Any], *, waits: bool = True) -> list[dict[str, Any]]:
    """What the events depend on, for each depth. A step of many micro-batches is recorded with two, and a pipeline as
    one stage. ``waits``: an offloaded update, as the measured programs had it, of which the program waits for the end.
    """
    key = {name: row[name] for name in (*_SHAPE, *_RUN)} | {name: row.get(name, least) for name, least in _ALSO.items()}
    key |= {"accumulation": min(2, row["accumulation"]), "waits": waits and key["optimizer_on_host"]}
    key["attention"] = "plain" if key["attention"] == "plain" else "fused"
    key["gpus"] //= row.get("stages", 1)
    return [key] if "memory_gib" in row else [key | {"layers": depth} for depth in DEPTHS]


def name_of(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


# -- the simulated job ----------------------------------------------------------------------------------------------


def config_of(key: dict[str, Any]) -> dict[str, Any]:
    """The engine's configuration: default keys, bf16 AdamW, clipping; all logits, as published programs had them."""
    zero: dict[str, Any] = {"stage": key["zero"]}
    if key["optimizer_on_host"]:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if key["group"]:  # optimizer states over some of the ranks, parameters whole
        zero |= {"stage": 3, "mics_shard_size": key["group"], "stage3_param_persistence_threshold": 10**13}
    parts = {"autotp_size": key["tensor"], "sequence_parallel_norms": key["sequence_parallel"]}
    parts["vocab_parallel_lm_head"] = True  # as all programs have it that were measured
    return {
        "train_micro_batch_size_per_gpu": key["micro_batch"],
        "gradient_accumulation_steps": key["accumulation"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "sequence": {"loss": "whole"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **({"tensor_parallel": parts} if key["tensor"] > 1 else {}),
    }


def subject_of(key: dict[str, Any]) -> Subject:
    shape = Shape(
        width=key["hidden"], blocks=key["layers"], heads=key["heads"], inner=key["ffn"], vocabulary=key["vocab"],
        positions=key["sequence"], key_heads=key["key_heads"], gated=key["gated"], tied=key["tied"],
    )  # fmt: skip
    recompute = key["recompute"] in ("full", "selective")
    subject = decoder_subject("row", shape, samples=key["micro_batch"], sequence=key["sequence"], recompute=recompute)
    parted = replace(subject, build=lambda: PartedDecoder(shape, recompute=recompute))
    return parted if key["tensor"] > 1 else subject


class PartedDecoder(models.Decoder):
    """A decoder whose logits stay in parts: the engine puts its loss where transformers' models have theirs."""

    _loss_function: Any = None

    @property
    def loss_function(self) -> Any:
        return self._loss_function

    @loss_function.setter
    def loss_function(self, function: Any) -> None:
        self._loss_function = function

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        def parts(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.loss_function(logits.view(*tokens.shape, -1), tokens)
            return loss

        with patch.object(functional, "cross_entropy", parts):
            return super().forward(tokens)


def _mixed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(-1, -2))
    return torch.matmul(functional.dropout(scores.softmax(-1), 0.1), value)


class _PlainAttention(models.Attention):
    """Scores in memory, as Megatron had them before 2023: scale, mask and softmax are one kernel, dropout another.
    ``again``: these alone are computed once more in the backward (Korthikanti et al. 2022, "selective").
    """

    again = False

    def forward(self, x: torch.Tensor, angles: Any) -> torch.Tensor:
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in layers)
        if angles is not None:
            query, key = (models._rotated(part, *angles) for part in (query, key))
        times = query.shape[1] // key.shape[1]
        if times > 1:
            key, value = (part.repeat_interleave(times, 1) for part in (key, value))
        mixed = checkpoint(_mixed, query, key, value, use_reentrant=False) if self.again else _mixed(query, key, value)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _CoreAgain(_PlainAttention):
    again = True


def _selective() -> Any:
    """Recomputation as torchtitan's default has it: attention, every second product and collectives are kept."""
    products = {again: itertools.count() for again in (False, True)}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.name()
        if name.startswith(("aten::mm", "aten::addmm")):
            keep = next(products[context.is_recompute]) % 2 == 0
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if "attention" in name else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def _as_measured(key: dict[str, Any]) -> Iterator[None]:
    """Inside, the model and the engine are as in the program that was measured."""
    with contextlib.ExitStack() as stack:
        # the order was checked by the tests; without it a recording takes two thirds of the time
        stack.enter_context(patch.object(OrderCheck, "feed", lambda *_: None))
        if key["recompute"] == "selective":
            selective: Any = functools.partial(models.checkpoint, context_fn=_selective)
            stack.enter_context(patch.object(models, "checkpoint", selective))
        if key["attention"] == "plain":
            attention = _CoreAgain if key["recompute"] == "core" else _PlainAttention
            stack.enter_context(patch.object(models, "Attention", attention))
        if key["waits"]:
            stack.enter_context(patch.object(runtime, "_worker", lambda *_: None))
        yield


# -- recordings ------------------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """The events of a step: of its first micro-batch and, where it has several, of its last; bytes of the whole run.
    ``fused``: for each launch of both the bytes that it would move in a compiled block, -1 where it would be no kernel.
    """

    first: list[Event] = field(default_factory=list)
    last: list[Event] = field(default_factory=list)
    fused: list[int] = field(default_factory=list)
    peak: int = 0
    reserved: int = 0
    states: int = 0
    parameters: int = 0


def simulated(key: dict[str, Any]) -> Recording:
    """Run the real engine on the simulated device."""
    events: list[Event] = []
    with _as_measured(key):
        job = RankJob(
            config_of(key), load_machine("h100"), key["gpus"], sharded_init=key["zero"] == 3 and not key["group"],
            steps=STEPS[key["accumulation"]],
        )  # fmt: skip
        outcome = run.run_job(job, subject_of(key), events=events)
    fused = _fused(events)
    kept = [event for event in events if isinstance(event, (Launch, Wait, HostWait, Record, Phase, Talk))]
    starts = [place for place, event in enumerate(kept) if isinstance(event, Phase) and event.name == "forward"]
    micros = [kept[begin:end] for begin, end in itertools.pairwise([*starts, len(kept)])]
    return Recording(
        micros[0], micros[-1] if len(micros) > 1 else [], fused, outcome.peak, outcome.reserved, outcome.states,
        outcome.parameters,
    )  # fmt: skip


def _fused(events: list[Event]) -> list[int]:
    """Of each launch the bytes that it moves where a compiler makes one kernel of all small operations in a row, on
    the compute stream in forward and backward: what the row makes and uses itself, and nobody later, stays in
    registers. -1: it is in the kernel of the row's last operation.
    """
    launches = [event for event in events if isinstance(event, Launch)]
    last_read = {touch.buffer: place for place, event in enumerate(launches) for touch in event.reads}
    sizes, rows, row, phase = [event.work.nbytes for event in launches], list[list[int]](), list[int](), ""
    place = 0
    for event in [*events, Phase("end")]:
        small = isinstance(event, Launch) and event.stream == COMPUTE and event.work.kind == "kernel"
        if row and isinstance(event, (Launch, Phase)) and not (small and phase in ("forward", "backward")):
            rows.append(row)
            row = []
        phase = event.name if isinstance(event, Phase) else phase
        if isinstance(event, Launch):
            if small and phase in ("forward", "backward"):
                row.append(place)
            place += 1
    for places in rows:
        made, read = set[int](), dict[int, int]()
        written = dict[int, int]()
        for at in places:
            for touch in launches[at].reads:
                if touch.buffer not in made:
                    read[touch.buffer] = max(read.get(touch.buffer, 0), touch.stop - touch.start)
            for touch in launches[at].writes:
                made.add(touch.buffer)
                written[touch.buffer] = max(written.get(touch.buffer, 0), touch.stop - touch.start)
            sizes[at] = -1
        kept = sum(size for buffer, size in written.items() if last_read.get(buffer, math.inf) > places[-1])
        sizes[places[-1]] = sum(read.values()) + kept
    return sizes


# -- their file ------------------------------------------------------------------------------------------------------


def _packed(found: Recording) -> dict[str, Any]:
    """Plain lists: ``order`` with the numbers of its launches, ranks and events replaced by their places."""
    numbers: dict[tuple[Any, ...], int] = {}
    names: dict[int, int] = {}
    fused = iter(found.fused)

    def small(event: Event) -> list[Any]:
        match event:
            case Launch(stream=stream, name=name, work=work):
                ranks = [len(work.ranks), work.ranks[1] - work.ranks[0]] if len(work.ranks) > 1 else []
                item = (work.flops, work.nbytes, tuple(work.shape), tuple(ranks), next(fused))
                place = numbers.setdefault(item, len(numbers))
                return ["L", stream, name, work.kind, work.dtype, work.pinned, place]
            case Record(event=number, stream=stream):
                return ["R", names.setdefault(number, len(names)), stream]
            case Wait(stream=stream, event=number):
                return ["W", stream, names.setdefault(number, len(names))]
            case HostWait(what=what, stream=stream, event=number):
                return ["H", what, stream, number if number is None else names.setdefault(number, len(names))]
            case Phase(name=name):
                return ["P", name]
            case Talk(seconds=seconds):
                return ["T", seconds]
        raise TypeError(event)

    order = [[small(event) for event in micro] for micro in (found.first, found.last)]
    sizes = {name: getattr(found, name) for name in ("peak", "reserved", "states", "parameters")}
    return {"order": order, "numbers": [list(item) for item in numbers], **sizes}


def _unpacked(document: dict[str, Any]) -> Recording:
    numbers = document["numbers"]
    fused: list[int] = []

    def event(item: list[Any]) -> Event:
        match item:
            case ["L", stream, name, kind, dtype, pinned, place]:
                flops, nbytes, shape, ranks, moved = numbers[place]
                fused.append(moved)
                members = tuple(range(0, ranks[0] * ranks[1], ranks[1])) if ranks else ()
                return Launch(stream, name, (), (), Work(kind, flops, nbytes, dtype, tuple(shape), members, pinned))
            case ["R", number, stream]:
                return Record(number, stream)
            case ["W", stream, number]:
                return Wait(stream, number)
            case ["H", what, stream, number]:
                return HostWait(what, stream, number)
            case ["P", name]:
                return Phase(name)
        return Talk(item[1])

    first, last = ([event(item) for item in micro] for micro in document["order"])
    sizes = {name: document[name] for name in ("peak", "reserved", "states", "parameters")}
    return Recording(first, last, fused, **sizes)


def record(key: dict[str, Any]) -> None:
    """Simulate and keep the recording in the cache, unless it is there."""
    path = CACHE / f"{name_of(key)}.json"
    if path.exists():
        return
    began, found = time.process_time(), simulated(key)
    CACHE.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(_packed(found) | {"key": key}))
    part.rename(path)
    print(f"{time.process_time() - began:6.1f} s  {len(found.first) + len(found.last):6} events  {key}", flush=True)


def keys_in_use() -> dict[str, dict[str, Any]]:
    """Every key of every row, by name; some offloaded rows as they were measured, and as this engine updates."""
    keys = [key for row in rows_of() for key in keys_of(row)]
    keys += [key for row in rows_of() if row.get("ours") for key in keys_of(row, waits=False)]
    return {name_of(key): key for key in keys}


def pack() -> None:
    """Write what is in use from the cache into the repository."""
    kept: dict[str, Any] = {}
    for name in sorted(keys_in_use()):
        path = CACHE / f"{name}.json"
        if path.exists():
            kept[name] = json.loads(path.read_text())
            kept[name].pop("key")
    PACKED.write_bytes(lzma.compress(json.dumps(kept, separators=(",", ":")).encode(), preset=9))
    print(f"{PACKED.name}: {len(kept)} recordings, {PACKED.stat().st_size:,} bytes")


@functools.cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(lzma.decompress(PACKED.read_bytes()))
    return content


@functools.cache
def _recording(name: str) -> Recording | None:
    document = _content().get(name)
    return None if document is None else _unpacked(document)


def recording_of(key: dict[str, Any]) -> Recording:
    """The recording of a key. SystemExit where there is none."""
    found = _recording(name_of(key))
    if found is None:
        raise SystemExit(f"no recording of {key}: run benchmarks/simulator.py record")
    return found


def is_recorded(row: dict[str, Any]) -> bool:
    return all(name_of(key) in _content() for key in keys_of(row))


def by(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by a field of theirs."""
    groups = defaultdict[str, list[dict[str, Any]]](list)
    for row in rows:
        groups[row[name]].append(row)
    return groups
