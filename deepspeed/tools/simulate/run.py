"""One simulated run: the real engine on a device that does not exist, for a few steps, and what the last one took."""

import contextlib
import functools
import gc
import logging
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from deepspeed.accelerator.device import move_to_device
from deepspeed.client.zero.init import Init
from deepspeed.config import load_config
from deepspeed.engine.initialize import initialize
from deepspeed.monitor import hostmem, monitor
from deepspeed.monitor.log import logger
from deepspeed.sequence.tiling import blocks
from deepspeed.tools.simulate.control import Control, talking
from deepspeed.tools.simulate.costs import Machine
from deepspeed.tools.simulate.device import NAME
from deepspeed.tools.simulate.events import DEVICE, Event
from deepspeed.tools.simulate.install import recording
from deepspeed.tools.simulate.models import Subject
from deepspeed.tools.simulate.order import Unordered
from deepspeed.tools.simulate.record import Recorder
from deepspeed.tools.simulate.timeline import Interval, Timeline
from deepspeed.zero.memory.fit import MemoryPlan
from deepspeed.zero.plan import make_plan

# Some steps teach the schedule and the ranks, who then agree in advance; the fifth is what every later one is.
STEPS = 5
T = TypeVar("T")


@dataclass
class Outcome:
    """Outcome of the last step of a run, of one rank. Times in seconds, memory in bytes; ``left``: after
    ``engine.destroy()``, the weights; ``plan``: what the engine said before it built anything. ``agreement_seconds``:
    of the program, for ``messages``. ``plain_attention``: calls that were plain products, by kind. ``routing``: what is
    assumed of the choice of experts; ``chosen``: what blocks keep by ``sequence.plan``.
    """

    parameters: int
    seconds: float
    phases: dict[str, float]
    exposed: dict[tuple[str, str], float]
    late: dict[str, float]
    waited: dict[tuple[str, str], float]
    waits: Counter[tuple[str, str]]
    busy: dict[int, float]
    messages: int
    agreement_seconds: float
    states: int
    peak: int
    at_peak: dict[str, int]
    reserved: int
    retries: int
    host: dict[str, int]
    plan: MemoryPlan
    streams: dict[int, str]
    plain_attention: dict[str, int]
    routing: str
    chosen: str
    spans: list[Interval] = field(default_factory=list)
    build_peak: int = 0
    left: int = 0
    unordered: list[Unordered] = field(default_factory=list)

    @property
    def exposed_seconds(self) -> float:
        """Return the seconds that the compute stream stood because of other streams."""
        return sum(self.exposed.values())


def _forward(engine: Any, subject: Subject, step: int) -> torch.Tensor:
    batch = move_to_device(subject.batch(engine.module, step), NAME)
    if isinstance(batch, Mapping):
        return subject.loss(engine(**batch), batch)
    return subject.loss(engine(*batch) if isinstance(batch, (list, tuple)) else engine(batch), batch)


@contextlib.contextmanager
def _elsewhere(machine: Machine, config: dict[str, Any], world: int) -> Iterator[dict[str, Any]]:
    """Yield the configuration on the simulated machine: its host memory, for drives an empty folder, no records.

    All ranks say what this one says, the name of their memory included: it is one, as large as that of the nodes whose
    devices they would fill.
    """
    size = int(machine["host_bytes"] * max(1.0, world / machine["gpus_per_node"]))
    pool = hostmem.Pool(("simulated",), "memory of the simulated nodes", size, size)
    level = logger.level
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ds_simulate_"))
        stack.enter_context(patch.object(hostmem, "memory_pools", lambda *_: [pool]))
        stack.callback(logger.setLevel, level)
        logger.setLevel(max(level, logging.WARNING))
        zero = {
            key: value | {"nvme_path": folder} if isinstance(value, dict) and value.get("device") == "nvme" else value
            for key, value in dict(config.get("zero_optimization") or {}).items()
        }
        seen = {k: v for k, v in config.items() if k not in ("observe", "flops_profiler", *monitor.WRITERS)}
        yield seen | {"zero_optimization": zero} if zero else seen


class TrainingLoop:
    """Train for a step at a time, micro-batch by micro-batch."""

    def __init__(self, recorder: Recorder, engine: Any, subject: Subject) -> None:
        self._recorder, self._engine, self._subject = recorder, engine, subject
        self._accumulation = engine.gradient_accumulation_steps()

    def step(self, number: int) -> None:
        for micro in range(self._accumulation):
            self._recorder.enter_phase("forward")
            loss = _forward(self._engine, self._subject, number * self._accumulation + micro)
            self._recorder.enter_phase("backward")
            self._engine.backward(loss)
            del loss
            self._recorder.enter_phase("step")
            self._engine.step()


@dataclass(frozen=True)
class RankJob:
    """Rank of a simulated job: rank ``rank`` of ``world`` trains with ``config`` (a dict, as for ``initialize``) for
    ``steps`` steps. ``sharded_init``: the model is built under ``zero.Init``; None: where its parameters will be cut.
    ``keep``: with every span of the last step. ``skew``: tokens of this rank's experts, in even shares.
    """

    config: dict[str, Any]
    machine: Machine
    world: int
    rank: int = 0
    keep: bool = False
    sharded_init: bool | None = None
    steps: int = STEPS
    skew: float = 1.0


def simulate(subject: Subject, config: dict[str, Any], machine: Machine, **job: Any) -> Outcome:
    """Simulate a ``RankJob`` of ``subject``, whose other fields are ``job``. Raises what ``initialize`` raises."""
    return run_job(RankJob(config, machine, **job), subject)


def _start(job: RankJob, subject: Subject, config: dict[str, Any], column: Sequence[int] = ()) -> Any:
    """Return the engine of ``job``, whose model is built where its program would build it."""
    parsed = load_config(job.config, world_size=job.world)
    cut = not column and make_plan(parsed, job.world // parsed.tensor_parallel.ways).regular.param.sharded
    sharded = cut if job.sharded_init is None else job.sharded_init
    with Init(config_dict_or_path=config) if sharded else torch.device("cpu" if column else NAME):
        model = subject.build()
    return initialize(model=model, config=config)[0]


def look_at_start(job: RankJob, subject: Subject, look: Callable[[Any], T]) -> T:
    """Return ``look(engine)`` once ``initialize`` has returned on the rank of ``job``. Raises what that raises."""
    with (
        recording(job.machine, world=job.world, rank=job.rank) as recorder,
        talking(recorder),
        _elsewhere(job.machine, job.config, job.world) as config,
    ):
        engine = _start(job, subject, config)
        try:
            return look(engine)
        finally:
            engine.destroy()


def run_job(
    job: RankJob, subject: Subject, *, store: dist.Store | None = None, column: Sequence[int] = (),
    loop: Callable[[Recorder, Any, Subject], Any] = TrainingLoop, events: list[Event] | None = None,
) -> Outcome:  # fmt: skip
    """Return the outcome of the last step of ``job``. ``column``: the ranks, one of each pipeline stage, that share
    ``store``; ``loop(recorder, engine, subject).step(number)`` trains; ``events`` gets those of the last step.
    """
    with (
        recording(job.machine, world=job.world, rank=job.rank, keep=job.keep, store=store) as recorder,
        talking(recorder, column=column, skew=job.skew) as control,
        patch.object(blocks, "log_dist", functools.partial(setattr, recorder, "chosen")),
        _elsewhere(job.machine, job.config, job.world) as config,
    ):
        engine = _start(job, subject, config, column)
        build_peak = recorder.usage.of(DEVICE).peak
        steps = loop(recorder, engine, subject)
        if events is not None:
            recorder.listeners.append(events.append)
        for step in range(job.steps):
            recorder.catch_up(recorder.timeline.end)
            for restarted in (recorder.usage, recorder.timeline, control):
                restarted.restart()
            begin = recorder.timeline.end
            if events is not None:
                events.clear()
            steps.step(step)
        if events is not None:
            recorder.listeners.remove(events.append)
        recorder.catch_up(recorder.timeline.end)
        outcome = _outcome(recorder, engine, begin, control)
        outcome.build_peak = build_peak
        engine.destroy()
        outcome.left = recorder.usage.of(DEVICE).now
        del engine, steps
        gc.collect()  # the end of what it held is part of the run
        outcome.unordered = list(recorder.order.problems)
    return outcome


def times_of(timeline: Timeline, begin: float = 0.0) -> dict[str, Any]:
    """Return the fields of an outcome that a timeline knows, of what it did since ``begin``."""
    end, phases = timeline.end, defaultdict[str, float](float)
    for (name, start), (_, stop) in zip(timeline.phases, [*timeline.phases[1:], ("", end)], strict=True):
        phases[name] += stop - start
    return {
        "seconds": end - begin,
        "phases": dict(phases),
        "exposed": dict(timeline.exposed),
        "late": dict(timeline.late),
        "waited": dict(timeline.waited),
        "waits": timeline.waits.copy(),
        "busy": dict(timeline.busy),
        "spans": list(timeline.spans or ()),
    }


def whole_numel(param: torch.nn.Parameter) -> int:
    """Return the elements of a parameter, of which this rank may have a part: of its experts, or of its heads."""
    place = getattr(param, "tp_place", None)
    return getattr(param, "ds_numel", param.numel()) if place is None else math.prod(place.shape)


def _outcome(recorder: Recorder, engine: Any, begin: float, control: Control) -> Outcome:
    usage = recorder.usage.of(DEVICE)
    homes: dict[str, tuple[int, ...]] = getattr(engine.module, "tied_homes", dict)()  # of what several ranks hold
    elsewhere = tuple(name for name, places in homes.items() if places[0] != engine.get_pipeline_parallel_rank())
    params = [p for name, p in engine.module.named_parameters() if not f"{name}.".startswith(elsewhere)]
    return Outcome(
        parameters=sum(map(whole_numel, params)),
        **times_of(recorder.timeline, begin),
        messages=control.messages,
        agreement_seconds=control.seconds,
        states=usage.by_category["states"],
        peak=usage.peak,
        at_peak=dict(usage.at_peak),
        reserved=recorder.usage.allocator.peak_reserved,
        retries=recorder.usage.allocator.retries,
        host={place: place_usage.peak for place, place_usage in recorder.usage.places.items() if place != DEVICE},
        plan=engine.memory_plan(),
        streams=dict(recorder.streams),
        plain_attention=dict(recorder.plain_attention),
        routing=recorder.routing,
        chosen=recorder.chosen,
    )
