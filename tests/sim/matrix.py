"""Every configuration of the table on the simulated device, in a process of its own: the device is there to stay.

python -m tests.sim.matrix OUT.json [--only NAME ...] [--planted FAULT ...] [--events NAME] [--agree RANKS ...]
"""

import argparse
import contextlib
import itertools
import json
import pickle
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from deepspeed.checkpoint.save.collect import Elements, TensorPart
from deepspeed.checkpoint.save.content import Copies
from deepspeed.checkpoint.save.writer import Saver
from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.row_exchange import start_all_to_all, start_shift
from deepspeed.errors import CheckpointError
from deepspeed.sequence import heads, ring
from deepspeed.sequence.tiling.offload import OffloadActivations, _Activation
from deepspeed.tier import store
from deepspeed.tier.aio import AioEngine, DirectFile
from deepspeed.tier.arena import Arena
from deepspeed.tier.drive import Drive, Stored
from deepspeed.tier.transfer import ARRIVED, Several, Transfer
from deepspeed.tools.simulate import run as run_module
from deepspeed.tools.simulate.costs import Machine, load_machine
from deepspeed.tools.simulate.device import MODULE, NAME
from deepspeed.tools.simulate.events import Event, HostWait, Launch, Phase
from deepspeed.tools.simulate.install import recording
from deepspeed.tools.simulate.models import Shape, Subject, decoder_subject
from deepspeed.tools.simulate.natives import _Pages
from deepspeed.tools.simulate.record import Recorder
from deepspeed.tools.simulate.run import STEPS, simulate
from tests.sim.loops import LOOPS, TOKENS, VOCABULARY, WIDTH, Model
from tests.sim.planted import raced

_CPU = {"device": "cpu", "pin_memory": True}
_LATE = {**_CPU, "delayed_update": True}
_COLUMNS = {"update_interval": 2, "overlap_step": True, "select_strategy": "step", "select_interval": 2}
_EARLY = {**_CPU, "super_offload": True}
_TRAVEL = {**_CPU, "device_states": "travel"}
_BUCKETS = {"reduce_bucket_size": 600_000}  # several units
_DRIVE = {"device": "nvme", "nvme_path": "/nowhere", "pin_memory": True}
# else the first billion of parameters stays in host memory
_DRIVE_ALL = {**_DRIVE, "max_in_cpu": 0}

_UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
_BEHIND = {"checkpoint": {"async": True}}

# the model is small: nearly all of it is to be cut, as all of a large one is
_CUT = {"stage3_param_persistence_threshold": 2000}


def _config(
    stage: int, *, accumulation: int = 1, dtype: str = "bf16", clip: float = 1.0, **zero: Any
) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, **_CUT, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
    }


def _experts(stage: int, *, ep: int = 4, etp: int = 1, tp: int = 1, **more: Any) -> dict[str, Any]:
    block = {"enabled": True, "autoep_size": ep, "expert_tensor_parallel_size": etp}
    return _config(stage, **more) | {"expert_parallel": block, "tensor_parallel": {"autotp_size": tp}}


def _sequences(
    stage: int, ways: int = 8, attention: str = "auto", memory: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    block = {"attention": attention, **(memory or {})}
    return _config(stage, **more) | {"sequence_parallel_size": ways, "sequence": block}


def _derived(config: dict[str, Any]) -> dict[str, Any]:
    del config["gradient_accumulation_steps"]
    return config | {"train_batch_size": 2 * WORLD}


WORLD = 8
CASES: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": _config(stage) for stage in range(4)},
    **{f"stage{stage}-accumulated": _config(stage, accumulation=2) for stage in (1, 2, 3)},
    **{f"stage{stage}-unclipped": _config(stage, clip=0.0) for stage in range(4)},
    "stage3-fp32-unclipped": _config(3, dtype="fp32", clip=0.0),
    "stage2-accumulated-unclipped": _config(2, accumulation=2, clip=0.0),
    "stage3-scheduled": _config(3) | {"scheduler": {"type": "WarmupLR"}},
    "mics-unclipped": _config(3, clip=0.0, mics_shard_size=4),
    # the window of stage3-accumulated, which follows from the batch
    "stage3-derived": _derived(_config(3)),
    "stage3-fp16": _config(3, dtype="fp16"),
    "stage3-fp32": _config(3, dtype="fp32"),
    "mics": _config(3, mics_shard_size=4),
    "hpz": _config(3, zero_hpz_partition_size=2),
    "no-overlap": _config(3, overlap_comm=False),
    "no-prefetch": _config(3, stage3_prefetch_bucket_size=0),
    "recomputed": _config(3),
    "optimizer-on-host": _config(3, offload_optimizer=_CPU),
    "optimizer-on-host-accumulated": _config(3, accumulation=2, offload_optimizer=_CPU),
    "stage2-optimizer-on-host": _config(2, offload_optimizer=_CPU),
    "parameters-on-host": _config(3, offload_param=_CPU),
    "both-on-host": _config(3, offload_optimizer=_CPU, offload_param=_CPU),
    "both-on-host-fp32": _config(3, dtype="fp32", offload_optimizer=_CPU, offload_param=_CPU),
    "both-on-host-accumulated": _config(3, accumulation=2, offload_optimizer=_CPU, offload_param=_CPU),
    "both-on-host-unclipped": _config(3, clip=0.0, offload_optimizer=_CPU, offload_param=_CPU),
    # no wait for a norm, behind which everything would be in order
    "both-on-host-unchecked": _config(3, clip=0.0, offload_optimizer=_CPU, offload_param=_CPU) | _UNCHECKED,
    "stage2-optimizer-on-host-unchecked": _config(2, clip=0.0, offload_optimizer=_CPU) | _UNCHECKED,
    # one rank, whose update goes on behind the program, whole parameters included
    "single-stage2-on-host-unchecked": _config(2, clip=0.0, offload_optimizer=_CPU) | _UNCHECKED,
    "single-both-on-host": _config(3, offload_optimizer=_CPU, offload_param=_CPU),
    "held-both-on-host": _config(3, offload_optimizer=_CPU, offload_param=_CPU),
    "recomputed-both-on-host": _config(3, offload_optimizer=_CPU, offload_param=_CPU),
    "no-overlap-both-on-host": _config(3, overlap_comm=False, offload_optimizer=_CPU, offload_param=_CPU),
    "stage1-optimizer-on-host-unpinned": _config(1, offload_optimizer={"device": "cpu", "pin_memory": False}),
    "half-on-host": _config(3, offload_optimizer={**_CPU, "ratio": 0.5}),
    "optimizer-on-drive": _config(3, offload_optimizer=_DRIVE),
    "both-on-drive": _config(3, offload_optimizer=_DRIVE, offload_param=_DRIVE_ALL),
    # a block that only some steps run: what was fetched for it early is not used
    "skipping": _config(3),
    "skipping-on-host": _config(3, offload_optimizer=_CPU),
    "skipping-on-drive": _config(3, offload_optimizer=_DRIVE, offload_param=_DRIVE_ALL),
    # the user holds gathered parameters over a step
    "held": _config(3),
    # another rank runs other modules, and asks for what this one does not need
    "serving": _config(3),
    # gradients and states are looked at and moved in the middle of a window
    "looking": _config(3, accumulation=2),
    "looking-at-stage2": _config(2, accumulation=2),
    "reading-at-stage0": _config(0),
    "leaving": _config(3),
    "setting-on-drive": _config(3, dtype="fp32", offload_optimizer=_DRIVE, offload_param=_DRIVE_ALL),
    "setting-on-host": _config(2, dtype="fp32", offload_optimizer=_CPU),
    "stage2-optimizer-on-host-accumulated": _config(2, accumulation=2, offload_optimizer=_CPU),
    "hpz-parameters-on-host": _config(3, zero_hpz_partition_size=2, offload_param=_CPU),
    "hpz-accumulated": _config(3, accumulation=2, zero_hpz_partition_size=2),
    # a read, or an update, fails half way, and the client goes on, or ends
    "failing-on-host": _config(3, offload_param=_CPU),
    "torn-on-drive": _config(3, offload_optimizer={**_DRIVE, "buffer_count": 4}),
    # the norm is read after the update, as the client asks for it
    "asking": _config(3, clip=0.0),
    # saves in the background, whose thread is late or early; the client writes at once
    "saving": _config(3) | _BEHIND,
    "saving-at-stage1": _config(1) | _BEHIND,
    "saving-fp32-at-stage0": _config(0, dtype="fp32") | _BEHIND,
    "saving-accumulated": _config(3, accumulation=2) | _BEHIND,
    "saving-both-on-host": _config(3, offload_optimizer=_CPU, offload_param=_CPU) | _BEHIND,
    "sooner": _config(3) | _BEHIND,
    "writing": _config(3) | _BEHIND,
    "slots": _config(3) | _BEHIND,
    "lending": _config(3) | _BEHIND,
    "writing-at-stage1": _config(1, dtype="fp32") | _BEHIND,
    "stage1-optimizer-on-drive": _config(1, offload_optimizer=_DRIVE),
    # updates beside the next forward and backward
    "delayed-on-host": _config(3, offload_optimizer=_LATE),
    "stage2-delayed-on-host-unchecked": _config(2, clip=0.0, offload_optimizer=_LATE) | _UNCHECKED,
    "slots-delayed-on-host-accumulated": _config(3, accumulation=2, offload_optimizer=_LATE),
    "evaluating-delayed-on-host-accumulated": _config(3, accumulation=2, offload_optimizer=_LATE),
    # The same where copies take longer than all else: a question whether one has ended is answered with no, which on a
    # fast bus orders what comes after it. Nothing waits for a norm, behind which everything would be in order.
    "delayed-on-host-unchecked-slow": _config(3, clip=0.0, offload_optimizer=_LATE) | _UNCHECKED,
    "stage2-delayed-on-host-fp32-slow": _config(2, clip=0.0, dtype="fp32", offload_optimizer=_LATE),
    "zenflow-on-host-unchecked-slow": _config(3, clip=0.0, offload_optimizer=_CPU, zenflow=_COLUMNS) | _UNCHECKED,
    "stage2-early-on-host-unchecked-slow": _config(2, clip=0.0, offload_optimizer=_EARLY, **_BUCKETS) | _UNCHECKED,
    "visiting-on-host-unchecked-slow": (_config(3, clip=0.0, offload_optimizer={**_TRAVEL, "ratio": 0.5}) | _UNCHECKED),
    # columns at once, the rest beside the next window
    "zenflow-on-host": _config(3, offload_optimizer=_CPU, zenflow=_COLUMNS),
    "slots-zenflow-on-host-accumulated": _config(2, accumulation=2, offload_optimizer=_CPU, zenflow=_COLUMNS),
    # updates that begin beside the backward
    "single-early-on-host": _config(3, offload_optimizer=_EARLY),
    "single-stage2-early-on-host-fp32": _config(2, dtype="fp32", offload_optimizer=_EARLY, **_BUCKETS),
    "early-both-on-host-accumulated": _config(3, accumulation=2, offload_optimizer=_EARLY, offload_param=_CPU),
    "stage2-early-on-host": _config(2, offload_optimizer=_EARLY, **_BUCKETS),
    "slots-early-on-host": _config(3, offload_optimizer=_EARLY),
    # optimizer states that visit the device: every second unit, or as the rates say
    "slots-visiting-on-host": _config(3, offload_optimizer={**_TRAVEL, "ratio": 0.5}),
    "visiting-on-host": _config(3, offload_optimizer={**_TRAVEL, "ratio": 0.5}),
    "stage2-visiting-on-host-unchecked": _config(2, clip=0.0, offload_optimizer=_TRAVEL, **_BUCKETS) | _UNCHECKED,
    # experts over ranks: the counts of tokens are waited for, and nothing else
    "experts-stage1": _experts(1),
    "experts-stage2-accumulated": _experts(2, accumulation=2),
    "experts-stage3": _experts(3),
    "experts-alone": _experts(3, ep=8),
    "experts-folded": _experts(3, tp=2, ep=8),
    "experts-shared-folded": _experts(3, tp=2, etp=2, ep=2),
    "experts-hpz": _experts(3, zero_hpz_partition_size=4),
    "experts-recomputed": _experts(3),
    "experts-optimizer-on-host": _experts(3, offload_optimizer=_CPU),
    "experts-both-on-host-unchecked": _experts(3, clip=0.0, offload_optimizer=_CPU, offload_param=_CPU) | _UNCHECKED,
    # a sequence over ranks: that they got the same, and where documents begin, is waited for, and nothing else
    "sequences-stage1": _sequences(1),
    "sequences-stage2-accumulated": _sequences(2, 2, accumulation=2),
    "sequences-stage3-fp32": _sequences(3, dtype="fp32"),
    "sequences-ring": _sequences(3, attention="ring"),
    "sequences-ring-recomputed": _sequences(3, attention="ring"),
    # in tiles; and what the forward keeps in host memory
    "sequences-tiled": _sequences(1, memory={"loss": "tiled", "mlp_tiles": 2}),
    "sequences-kept": _sequences(3, memory={"loss": "tiled", "offload_activations": True}),
    "sequences-both": _sequences(3, attention="both"),
    "sequences-both-on-host-unchecked": (
        _sequences(3, clip=0.0, offload_optimizer=_CPU, offload_param=_CPU) | _UNCHECKED
    ),
    "stage1-visiting-on-host-fp32": _config(1, dtype="fp32", accumulation=2, offload_optimizer=_TRAVEL, **_BUCKETS),
}
_LINE = re.compile(r":[0-9]+ ")


def _machine(name: str) -> Machine:
    """An H100; where the bus is slow, with one that takes longer than what computes."""
    h100 = load_machine("h100")
    return replace(h100, values=h100.values | {"bus_rate": 2e7}) if name.endswith("slow") else h100


def _subject(name: str) -> Subject:
    if name in ("stage3", "recomputed", "recomputed-both-on-host"):  # attention too
        shape = Shape(WIDTH, 2, 4, 1024, VOCABULARY, 512, 4)
        return decoder_subject(name, shape, samples=1, sequence=64, recompute=name.startswith("recomputed"))
    if name.startswith("experts"):
        routed: dict[str, Any] = {"gated": True, "experts": 8, "choices": 2, "expert": 512, "shared": 256}
        shape = Shape(WIDTH, 2, 4, 1024, VOCABULARY, 512, 4, **routed)
        return decoder_subject(name, shape, samples=1, sequence=64, recompute="recomputed" in name)
    if name.startswith("sequences"):
        shape = Shape(WIDTH, 2, 8, 1024, VOCABULARY, 512, key_heads=4, gated=True)
        kept = name.endswith("kept")  # all that has as many bytes as are worth a copy
        recompute = kept or "recomputed" in name
        return decoder_subject(name, shape, samples=1, sequence=4096 if kept else 64, recompute=recompute)
    before, _ = LOOPS.get(name.partition("-")[0], (lambda model, step: None, 2))

    def batch(model: nn.Module, step: int) -> torch.Tensor:
        before(model, step)
        return torch.randint(VOCABULARY, (TOKENS,), device=NAME)

    return Subject(name, Model, batch, lambda output, _: output)


def use_a_drive(recorder: Recorder) -> None:
    """Every verb of a drive, with nothing around it that waits too."""
    numel = 5 << 18
    with tempfile.TemporaryDirectory() as folder:
        drive = Drive(folder, label="nvme_path", staging=3, piece_bytes=1 << 20, pin=True, arena=Arena(pins=True))
        stored = Stored(drive, numel, torch.float32)
        values, out = torch.empty(numel, device="cpu"), torch.empty(numel, device="cpu", pin_memory=True)
        stored.put(values, zero_copy=True).wait()
        stored.put(values, zero_copy=True)
        stored.get(out).wait()  # what is written is read
        out.add_(1)
        stored.put(values, zero_copy=True)
        stored.put(out, zero_copy=True)  # and written again
        with stored.open(write=True) as opened:  # in pieces
            opened.add_(1)
        device = torch.empty(numel, device=NAME)
        stored.get(device)
        stored.put(device)
        held = stored.hold(lambda: None)
        held.read(0, out.view(torch.uint8))
        out.add_(1)
        held.release()
        stored.put(out, zero_copy=True)
        Several([stored.get(values[:4096]), stored.get(values[4096:8192], start=4096)]).wait()
        values.add_(1)
        stored.put(out, zero_copy=True)
        stored.drop()
        stored = Stored(drive, numel, torch.float32)  # the same place
        stored.put(values, zero_copy=True)
        drive.close()
        # Either end of a transfer waits for it by itself.
        for first, second in ((0, 1), (1, 0)):
            ends = AioEngine(), DirectFile(f"{folder}/file", create=True)
            ends[0].write(ends[1], 0, values)
            ends[first].close()
            values.add_(1)
            ends[second].close()


def use_an_arena(_: Recorder) -> None:
    """Memory that copies under way read and write is given back, is another's, and goes back to the system."""
    arena, nbytes, side = Arena(pins=True), 1 << 20, MODULE.Stream()
    device = torch.empty(nbytes, dtype=torch.uint8, device=NAME)
    for _ in range(2):
        with MODULE.stream(side):
            device.copy_(arena.empty(nbytes, pin=True), non_blocking=True)  # nobody else has the source
        arena.empty(nbytes, pin=True).zero_()
        with MODULE.stream(side):
            arena.empty(nbytes // 2, pin=True).copy_(device[: nbytes // 2], non_blocking=True)
    arena.close()


def use_copies_that_fail(_: Recorder) -> None:
    """A save fails between two copies: the update, and the next save, come after the first of them all the same."""
    copies, copy, calls = Copies(Arena(pins=True)), torch.Tensor.copy_, itertools.count()
    masters = [torch.zeros(1 << 20, device=NAME) for _ in range(2)]
    parts = [TensorPart("master", f"{n}", (1 << 20,), 0, Elements(m), quiet=True) for n, m in enumerate(masters)]

    def fails_later(target: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if next(calls):
            raise RuntimeError("out of memory")
        return copy(target, *args, **options)

    with contextlib.suppress(RuntimeError), mock.patch.object(torch.Tensor, "copy_", fails_later):
        copies.take(parts)
    copies.before_update()
    masters[0].add_(1)
    copies.take([TensorPart("master", "0", (1 << 20,), 0, Elements(torch.zeros(1 << 20, device="cpu")))])
    again = copies.take(parts)
    copies.arrive()
    again[0].values.add_(1)


ALONE = {"drive": use_a_drive, "arena": use_an_arena, "copies": use_copies_that_fail}


def order_of(name: str) -> list[str]:
    """What is unordered in that case, or with a part of the package alone."""
    if name not in ALONE:
        return list(run(name)["unordered"])
    with recording(load_machine("h100"), world=1) as recorder:
        ALONE[name](recorder)
    return [str(problem) for problem in recorder.order.problems]


def _round_without_waiting(out: torch.Tensor, values: torch.Tensor) -> Transfer:
    out.copy_(values, non_blocking=True)
    return ARRIVED


def _take_back_at_once(arena: Arena, reclaim: Callable[[Arena], None] = Arena._reclaim) -> None:
    arena.pins = False
    reclaim(arena)
    arena.pins = True


def _end_at_once(pages: Any) -> None:
    pages._recorder.stores.unmap(pages.buffer)


def _shift_without_waiting(values: torch.Tensor, out: torch.Tensor, group: AxisGroup) -> Transfer:
    start_shift(values, out, group)
    return ARRIVED


def _exchange_without_waiting(rows: torch.Tensor, group: AxisGroup, **numbers: list[int]) -> torch.Tensor:
    return start_all_to_all(rows, group, **numbers)[0]


def _let_go_at_once(self: OffloadActivations, kept: _Activation) -> None:
    _SEND(self, kept)
    kept.tensor = None


_SEND = OffloadActivations._send


# Faults that no missing call makes, each with a case: (owner, name, what is there instead).
PLANTED: dict[str, tuple[str, Any, str, Any]] = {
    "gradients are read before they have come down":
        ("both-on-host-unchecked", store, "round_into", _round_without_waiting),
    "memory of a copy under way is another's": ("arena", Arena, "_reclaim", _take_back_at_once),
    "states are written while a save copies them": ("saving", Saver, "before_update", lambda _: None),
    "keys of a ring are read before they have come": ("sequences-ring", ring, "start_shift", _shift_without_waiting),
    "memory of an activation that is on its way is another's":
        ("sequences-kept", OffloadActivations, "_send", _let_go_at_once),
    "heads are read before their tokens have come":
        ("sequences-stage1", heads, "all_to_all", _exchange_without_waiting),
    "pages end while a copy reads them": ("arena", _Pages, "__del__", _end_at_once),
}  # fmt: skip


def planted(faults: list[str]) -> dict[str, list[str]]:
    """What is said of each."""
    said = {}
    for fault in faults:
        case, owner, name, instead = PLANTED[fault]
        with mock.patch.object(owner, name, instead):
            try:
                said[fault] = order_of(case)
            except CheckpointError as error:
                said[fault] = [str(error)]
    return said


def run(name: str) -> dict[str, Any]:
    """Two steps of one configuration, as facts; with drives three, as two make room for an optimizer's slots."""
    published, crossed = list[int](), Counter[str]()
    scaled: list[str] = []
    _, steps = LOOPS.get(name.partition("-")[0], (None, 3 if name.endswith(("drive", "slow")) else 2))

    def hear(event: Event) -> None:
        publishes = isinstance(event, Launch) and any(function == "publish_rest" for *_, function in event.site)
        if publishes and event.work.kind == "down":
            published.append(event.work.nbytes)
        if isinstance(event, Launch) and event.work.kind in ("down", "up"):
            crossed.update({function: event.work.nbytes for *_, function in event.site})
        if isinstance(event, Launch) and {"gradient", "_scaled"} & {function for *_, function in event.site}:
            scaled.append(event.name)

    with _hear(hear):
        world = 1 if name.startswith("single") else WORLD
        outcome = simulate(_subject(name), CASES[name], _machine(name), world=world, steps=steps)
    return {
        "seconds": outcome.seconds,
        "parameters": outcome.parameters,
        "states": outcome.states,
        "at_peak": outcome.at_peak,
        "host": outcome.host,
        "published": sum(published) / steps,
        "crossed": {function: nbytes / steps for function, nbytes in crossed.items()},
        "left": outcome.left,
        "pages": outcome.plan.pages,
        "planned": {line.what: line.host for line in outcome.plan.lines},
        "waits": sorted({f"{what}: {_LINE.sub(' ', where.partition(' <- ')[0])}" for what, where in outcome.waits}),
        "times": sum(outcome.waits.values()),
        "scaled": sorted(set(scaled)),
        "unordered": [str(problem) for problem in outcome.unordered],
    }


def _hear(hear: Callable[[Event], None]) -> contextlib.AbstractContextManager[Any]:
    """Inside, ``hear`` is told every event of a simulation, and so is whoever else wants to."""
    inner = run_module.recording

    @contextlib.contextmanager
    def heard(*args: Any, **options: Any) -> Iterator[Recorder]:
        with inner(*args, **options) as recorder:
            recorder.listeners.append(hear)
            yield recorder

    return mock.patch.object(run_module, "recording", heard)


PRINTED, TIMED_STEPS = 3, 7  # every so many updates; of so many


def timed() -> dict[str, Any]:
    """Samples per second are measured and logged: in which updates the program waits for the time, what it then says,
    and how long the last took.
    """
    config = _config(3) | {"steps_per_print": PRINTED}
    lines, waits, forwards = list[str](), list[int](), list[int]()

    def hear(event: Event) -> None:
        if isinstance(event, Phase) and event.name == "forward":
            forwards.append(1)
        if isinstance(event, HostWait) and any(file == "monitor/timers.py" for file, _, _ in event.site):
            waits.append(len(forwards))

    def batch(model: Any, step: int) -> torch.Tensor:
        model.tokens.weight._ds_unit.keeper.client().tput_timer.logging = lines.append
        return torch.randint(VOCABULARY, (TOKENS,), device=NAME)

    with _hear(hear):
        subject = Subject("timed", Model, batch, lambda output, _: output)
        outcome = simulate(subject, config, load_machine("h100"), world=WORLD, steps=TIMED_STEPS)
    return {"waits": waits, "lines": lines, "seconds": outcome.seconds, "samples": WORLD}


def _numbers() -> dict[str, tuple[Callable[[], object], int]]:
    """What programs do with a device and host memory, and how often they have to wait in it."""
    device, host = torch.ones(4096, device=NAME), torch.ones(4096, device="cpu")
    pinned, count = host.pin_memory(), torch.zeros((), dtype=torch.int64, device="cpu")
    mask = device > 0
    return {
        "a list of two": (lambda: device[:2].tolist(), 1),
        "two of one tensor": (lambda: (device[0].item(), device[1].item()), 2),
        "a number to the device": (lambda: count.to(NAME), 1),
        "a number from the device": (lambda: count.copy_(device[0]), 1),
        "a mask": (lambda: device[mask], 1),
        "values behind a mask": (lambda: device.__setitem__(mask, device[1:]), 1),
        "one value behind a mask": (lambda: device.__setitem__(mask, 0.0), 0),
        "page-locked": (lambda: (device.copy_(pinned, non_blocking=True), pinned.copy_(device, non_blocking=True)), 0),
        "ordinary memory": (lambda: device.copy_(host, non_blocking=True), 1),
        "lists": (lambda: torch._foreach_copy_([device, device], [pinned, host], non_blocking=True), 1),
        "blocking": (lambda: pinned.copy_(device), 1),
    }


def reads() -> dict[str, tuple[int, int]]:
    """How often a program waits in each of these, and how often it should."""
    found = {}
    with recording(load_machine("h100"), world=1) as recorder:
        for name, (run, times) in _numbers().items():
            before = recorder.timeline.waits.total()
            run()
            found[name] = recorder.timeline.waits.total() - before, times
    return found


def agreement(blocks: int, world: int) -> dict[str, Any]:
    """What ranks spend to agree on the collectives of a step, of a model with so many blocks of a 7B one; a step too
    early for predictions beside it.
    """
    subject = decoder_subject(
        "7B", Shape(4096, blocks, 32, 16384, 32000, 2048, 32), samples=1, sequence=2048, recompute=False
    )
    machine, config = load_machine("h100"), _config(3)
    free = replace(machine, values=machine.values | {"agreement_s": 1e-12, "agreement_hop_s": 1e-12})
    runs = [(machine, 2), (machine, STEPS), (free, 2), (free, STEPS)]
    learning, steady, learned, ideal = (simulate(subject, config, one, world=world, steps=steps) for one, steps in runs)
    return {
        "blocks": blocks, "step": steady.seconds, "messages": steady.messages, "program": steady.agreement_seconds,
        "exposed": steady.seconds - ideal.seconds, "unordered": [str(problem) for problem in steady.unordered],
        "learning": {
            "messages": learning.messages, "step": learning.seconds, "exposed": learning.seconds - learned.seconds,
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--agree", nargs="*", type=int, default=[], metavar="RANKS", help="what so many need to agree")
    parser.add_argument("--blocks", type=int, default=2, help="of the model whose ranks agree")
    parser.add_argument("--planted", nargs="*", default=list(PLANTED), metavar="FAULT", help="what is to be seen")
    parser.add_argument("--events", metavar="NAME", help="pickle the events of a case of these into OUT.events")
    options = parser.parse_args()
    facts, events = dict[str, Any](), list[Event]()
    for name in options.only:
        with _hear(events.append) if name == options.events else contextlib.nullcontext():
            facts[name] = run(name)
    facts |= {"reads": reads(), "timed": timed(), "alone": {name: order_of(name) for name in ALONE}}
    facts |= {"planted": planted(options.planted), "raced": raced()}
    for world in options.agree:
        facts[f"agreement of {world}"] = agreement(options.blocks, world)
    with open(options.out, "w") as file:
        json.dump(facts, file, indent=1)
    if options.events:
        with open(f"{options.out}.events", "wb") as file:
            pickle.dump(events, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
