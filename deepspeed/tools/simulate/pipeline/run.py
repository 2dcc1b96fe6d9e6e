"""One rank of every pipeline stage, each in a process of its own, and the last step of all put together.

Ranks of one stage do the same, so one stands for all. Each records its step as any simulated rank does, with its
messages; then the events of all stages go through timelines that wait for each other (``timeline.together``): a
message begins when both ends have come to it, so that whatever a schedule makes ranks wait for comes out by itself.
"""

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed.comm.mesh.topology import dense_topology
from deepspeed.config import DeepSpeedConfig, load_config
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.monitor.events import ACTION
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.orders import Action, Timed, chunks_and_style
from deepspeed.pipe.plain import PlainPipeline, cut_model
from deepspeed.tools.simulate.events import COMPUTE, Allocate, Event, Free, Launch, Seen
from deepspeed.tools.simulate.models import Subject
from deepspeed.tools.simulate.record import Recorder
from deepspeed.tools.simulate.run import Outcome, RankJob, run_job, times_of
from deepspeed.tools.simulate.timeline import Interval, Meetings, Timeline, together
from deepspeed.tools.verify.ranks import RankFailure, RankPool

_ACTION = re.compile(r"([FBIW])(\d+)\.(\d+)")
_LIMIT_S = 3600.0


@dataclass
class PipelineOutcome:
    """Outcome of a pipeline. ``steps``: the last step of a rank of each stage; ``ranks``: which ranks; ``actions``:
    what each computed when, in seconds since the step began.
    """

    ranks: tuple[int, ...]
    steps: list[Outcome]
    actions: list[list[Timed]]

    @property
    def seconds(self) -> float:
        """Return the seconds of the step, until the last stage is done."""
        return max(outcome.seconds for outcome in self.steps)

    @property
    def window(self) -> float:
        """Return the seconds from the first forward to the end of the last backward, of all stages."""
        rows = [row for row in self.actions if row]
        return max(row[-1].end for row in rows) - min(row[0].start for row in rows)

    def bubble(self, stage: int) -> float:
        """Return the seconds of that window in which a stage computes nothing of the batch."""
        return self.window - sum(one.end - one.start for one in self.actions[stage])


class _Batches:
    """Train for a step at a time, whole batches; note which action of the schedule launches what."""

    def __init__(self, recorder: Recorder, engine: Any, subject: Subject) -> None:
        self._recorder, self._engine = recorder, engine
        plain, numbers = isinstance(engine.module, PlainPipeline), itertools.count()

        def items() -> Iterator[Any]:
            for number in numbers:
                batch = subject.batch(engine.module, number)
                yield (batch, batch) if plain else batch

        self._items = items()
        engine.runtime.events.append(self._note)

    def step(self, _: int) -> None:
        self._recorder.enter_phase("step")
        self._engine.train_batch(self._items)

    def _note(self, kind: str, action: Action | None) -> None:
        if kind == ACTION:
            self._recorder.action = str(action or "")
            self._recorder.enter_phase("step" if action is None else "forward" if action.op == "F" else "backward")


def ways_of(config: Mapping[str, Any], world: int) -> int:
    """Return how many pipeline stages a configuration asks for; UsageError where they do not divide the ranks."""
    block = config.get("pipeline")
    stages = block.get("stages", 1) if isinstance(block, dict) else 1
    if not isinstance(stages, int) or stages < 1:
        return 1
    if world % stages:
        raise UsageError(f"pipeline.stages is {stages}, which does not divide {world} ranks; use a divisor")
    return stages


def _cut(subject: Subject, config: DeepSpeedConfig, stages: int) -> Subject:
    """Return the same model in stages, unless it is a PipelineModule already."""
    block = config.pipeline
    chunks, style = chunks_and_style(block.schedule or "1f1b", block.chunks_per_stage or 1)

    def build() -> PipelineModule:
        model = subject.build()
        if isinstance(model, PipelineModule):
            return model
        return cut_model(model, stages, loss_fn=subject.loss, chunks_per_stage=chunks, chunk_style=style)

    return replace(subject, build=build)


def _one(make: Callable[[], Subject], job: RankJob, column: tuple[int, ...], folder: str) -> Any:
    """Run one stage's rank in its process; return its outcome, and the events of its last step."""
    if dist.is_initialized():
        dist.destroy_process_group()  # the pool's own
    stage = int(os.environ["RANK"])
    events: list[Event] = []
    try:
        subject = _cut(make(), load_config(job.config, world_size=job.world // len(column)), len(column))
        store = dist.FileStore(f"{folder}/store", len(column))
        local_job = replace(job, rank=column[stage])
        outcome = run_job(local_job, subject, store=store, column=column, loop=_Batches, events=events)
    except DeepSpeedError as error:
        Path(f"{folder}/fault{stage}").write_text(str(error))
        raise
    kept = (event for event in events if not isinstance(event, (Allocate, Free, Seen)))
    return outcome, [e._replace(reads=(), writes=(), site=()) if isinstance(e, Launch) else e for e in kept]


def simulate_pipeline(make: Callable[[], Subject], job: RankJob, *, pool: RankPool | None = None) -> PipelineOutcome:
    """Simulate a rank of each stage of the pipeline that ``job.rank`` is in. ``make`` makes the model, and is
    picklable; ``pool``: of as many processes as there are stages. Raises UsageError with a rank's error.
    """
    stages = ways_of(job.config, job.world)
    config = load_config(job.config, world_size=job.world // stages)
    topology = dense_topology(tuple(range(job.world)), pp=stages, tp=config.tensor_parallel.ways)
    column = topology.axis(job.rank, "pp").ranks  # what a batch of that rank passes
    with tempfile.TemporaryDirectory(prefix="ds_simulate_") as folder, contextlib.ExitStack() as stack:
        pool = pool or stack.enter_context(RankPool(len(column), time_limit=_LIMIT_S))
        try:
            answers = pool.run(_one, make, job, column, folder, time_limit=_LIMIT_S)
        except RankFailure as failure:
            faults = [path.read_text() for path in sorted(Path(folder).glob("fault*"))]
            raise UsageError(faults[0]) from failure if faults else failure
    outcomes, events = [outcome for outcome, _ in answers], [trace for _, trace in answers]
    meetings, machine = Meetings(column), job.machine.used_by(job.world)
    timelines = [Timeline(machine, keep=True, rank=rank, meetings=meetings) for rank in column]
    together(timelines, events)
    steps = [replace(step, **times_of(timeline)) for step, timeline in zip(outcomes, timelines, strict=True)]
    return PipelineOutcome(column, steps, [list(_actions(outcome.spans)) for outcome in steps])


def _actions(spans: Sequence[Interval]) -> Iterator[Timed]:
    """Yield what a stage computed when: launches in a row that are for the same action."""
    compute = sorted((span for span in spans if span.stream == COMPUTE), key=lambda span: span.start)
    for label, group in itertools.groupby(compute, key=lambda span: span.label):
        if match := _ACTION.fullmatch(label):
            row = list(group)
            action = Action(match[1], int(match[2]), int(match[3]))
            yield Timed(action, row[0].start, row[-1].start + row[-1].seconds)
