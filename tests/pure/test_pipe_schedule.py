"""``deepspeed.runtime.pipe.schedule``: lists of instructions that stages could execute, step by step."""

import pytest

from deepspeed.pipe.orders import one_f_one_b
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.schedule import DataParallelSchedule, InferenceSchedule, TrainSchedule

SIZES = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 8), (4, 2), (4, 9)]


@pytest.mark.parametrize("kind", [TrainSchedule, InferenceSchedule])
@pytest.mark.parametrize(("stages", "micros"), SIZES)
def test_stages_that_execute_the_steps_with_blocking_calls_come_to_the_end_with_the_right_data(
    kind: type[schedule.PipeSchedule], stages: int, micros: int
) -> None:
    plans = [kind(micros, stages, stage) for stage in range(stages)]
    steps = [list(plan) for plan in plans]
    lengths = {len(one) for one in steps}
    assert lengths == {micros + stages - 1 if kind is InferenceSchedule else 2 * (micros + stages - 1)}
    activations = [[-1] * plan.num_pipe_buffers() for plan in plans]
    grads = [[-1] * plan.num_pipe_buffers() for plan in plans]
    done: list[list[tuple[str, int]]] = [[] for _ in range(stages)]
    for step in zip(*steps, strict=True):
        at = [0] * stages
        moved = True
        while moved:
            moved = False
            for stage in range(stages):
                while at[stage] < len(step[stage]):
                    one = step[stage][at[stage]]
                    if one.name.startswith(("Recv", "Send")):
                        up = one.name in ("SendActivation", "RecvGrad")
                        peer, partner = stage + (1 if up else -1), one.name.replace("Send", "Recv")
                        if one.name.startswith("Recv"):
                            break  # its sender does both
                        if at[peer] >= len(step[peer]) or step[peer][at[peer]].name != partner:
                            break
                        there = step[peer][at[peer]]
                        place = activations if up else grads
                        place[peer][there.buffer_id] = place[stage][one.buffer_id]
                        at[peer] += 1
                    elif one.name == "LoadMicroBatch" and stage == 0:
                        activations[0][one.buffer_id] = sum(name == "F" for name, _ in done[0])
                    elif one.name == "ForwardPass":
                        done[stage].append(("F", activations[stage][one.buffer_id]))
                    elif one.name == "BackwardPass":
                        if stage == stages - 1:
                            grads[stage][one.buffer_id] = activations[stage][one.buffer_id]
                        assert grads[stage][one.buffer_id] == activations[stage][one.buffer_id]
                        done[stage].append(("B", grads[stage][one.buffer_id]))
                    at[stage] += 1
                    moved = True
        assert at == [len(one) for one in step], f"stages wait for ever at {at} of {step}"
    order = one_f_one_b(stages, micros)
    wanted = [[(a.op, a.micro) for a in program] for program in order.actions]
    if kind is InferenceSchedule:
        wanted = [[("F", m) for m in range(micros)]] * stages
    assert done == wanted


def test_buffers_ends_and_places() -> None:
    assert [TrainSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [4, 3, 2, 2]
    assert [TrainSchedule(2, 4, stage).num_pipe_buffers() for stage in range(4)] == [2, 2, 2, 2]
    assert InferenceSchedule(8, 4, 0).num_pipe_buffers() == 2
    one = TrainSchedule(micro_batches=4, stages=1, stage_id=0)
    names = [[instruction.name for instruction in step] for step in one]
    assert names[:2] == [["LoadMicroBatch", "ForwardPass"], ["BackwardPass"]] and len(names) == 8
    assert names[-1] == ["BackwardPass", "ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
    assert repr(next(iter(one))) == "[LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)]"
    plain = DataParallelSchedule(3, 1, 0)
    sizes = [len(step) for step in plain]
    assert sizes == [3, 3, 5] and plain.num_pipe_buffers() == 1 and plain.num_micro_batches == 3
    assert isinstance(next(plain.steps())[0], schedule.LoadMicroBatch)
    middle = TrainSchedule(4, 3, 1)
    assert (middle.stage, middle.num_stages, middle.is_first_stage, middle.is_last_stage) == (1, 3, False, False)
    assert not any(isinstance(i, schedule.LoadMicroBatch) for step in middle for i in step)
