"""The orders of ``pipe/orders.py`` as lists of instructions, for clients that plan or draw a pipeline by them.

The engine does not execute them. A step ends on all stages before the next begins: what is sent in a step is received
in it. Within a step gradients travel first, and each stage sends before it receives, so blocking calls do not hang.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

from deepspeed.pipe.orders import forward_only, most_alive, one_f_one_b, timeline

_Base = TypeVar("_Base", bound="PipeInstruction")


class PipeInstruction:
    """Instruction of one stage; ``kwargs`` are its attributes too."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        self.__dict__.update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class BufferOpInstruction(PipeInstruction):
    """Instruction about the buffers ``buffer_id``, which hold one micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


def _kind(name: str, base: type[_Base]) -> type[_Base]:
    return type(name, (base,), {"__module__": __name__})


OptimizerStep = _kind("OptimizerStep", PipeInstruction)
ReduceGrads = _kind("ReduceGrads", PipeInstruction)
ReduceTiedGrads = _kind("ReduceTiedGrads", PipeInstruction)
LoadMicroBatch = _kind("LoadMicroBatch", BufferOpInstruction)
ForwardPass = _kind("ForwardPass", BufferOpInstruction)
BackwardPass = _kind("BackwardPass", BufferOpInstruction)
SendActivation = _kind("SendActivation", BufferOpInstruction)
RecvActivation = _kind("RecvActivation", BufferOpInstruction)
SendGrad = _kind("SendGrad", BufferOpInstruction)
RecvGrad = _kind("RecvGrad", BufferOpInstruction)


class PipeSchedule:
    """Plan of stage ``stage_id`` of ``stages`` by steps, for a batch of ``micro_batches``: 1F1B by default."""

    ending: tuple[type[PipeInstruction], ...] = ()  # of the batch

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.num_micro_batches, self.num_stages, self.stage = micro_batches, stages, stage_id
        self.is_first_stage, self.is_last_stage = stage_id == 0, stage_id == stages - 1
        self.order = one_f_one_b(stages, micro_batches)

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers, at least 2: one for each micro-batch that the stage keeps; used in turn."""
        return max(2, most_alive(self.order.actions[self.stage]))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step; all stages have equally many steps."""
        spans = [one for spans in timeline(self.order, {"F": 1.0, "B": 1.0}) for one in spans]
        micros = {(one.action.op, one.action.chunk, int(one.start)): one.action.micro for one in spans}
        stage, buffers = self.stage, self.num_pipe_buffers()
        kinds: list[tuple[type[BufferOpInstruction], str, int]] = [
            (SendGrad, "B", stage - 1),
            *([] if self.is_last_stage else [(RecvGrad, "B", stage)]),
            (SendActivation, "F", stage + 1),
            *([] if self.is_first_stage else [(RecvActivation, "F", stage)]),
            *([(LoadMicroBatch, "F", stage)] if self.is_first_stage or self.is_last_stage else []),
            (ForwardPass, "F", stage),
            (BackwardPass, "B", stage),
        ]
        last = max(int(one.start) for one in spans)
        for step in range(last + 1):
            doing = [kind(micros[op, at, step] % buffers) for kind, op, at in kinds if (op, at, step) in micros]
            yield [*doing, *(kind() for kind in self.ending if step == last)]

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()


class TrainSchedule(PipeSchedule):
    """1F1B, and the update."""

    ending = (ReduceTiedGrads, ReduceGrads, OptimizerStep)


class InferenceSchedule(PipeSchedule):
    """Forwards only; of two buffers one is computed and one sent."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.order = forward_only(tuple(range(stages)), micro_batches)

    def num_pipe_buffers(self) -> int:
        return 2


class DataParallelSchedule(PipeSchedule):
    """Plan without a pipeline: each step computes the gradients of a micro-batch."""

    def num_pipe_buffers(self) -> int:
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro in range(self.num_micro_batches):
            last = [ReduceGrads(), OptimizerStep()] if micro + 1 == self.num_micro_batches else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *last]
