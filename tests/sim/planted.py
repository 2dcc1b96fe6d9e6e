"""Small programs with a race planted in each, and the same programs in order: what is recorded has to show the one and
not the other.
"""

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist

from deepspeed.ops.adam import FusedAdam
from deepspeed.tier.aio import AioEngine, DirectFile
from deepspeed.tools.simulate.costs import load_machine
from deepspeed.tools.simulate.device import MODULE, NAME, SimEvent, SimStream
from deepspeed.tools.simulate.events import Event
from deepspeed.tools.simulate.install import recording
from tests.sim.oracle import Conflicts

NUMEL = 1 << 14
Program = Callable[[bool], object]
PROGRAMS: dict[str, Program] = {}
# which knows neither drives nor what an address is without memory
NOT_IN_BRUTE_FORCE = {"pinned_memory_freed_under_a_drive", "storage_read_while_it_is_empty", "memory_never_written"}


def program(run: Program) -> Program:
    """``run(planted)`` is one of them."""
    PROGRAMS[run.__name__] = run
    return run


def device(numel: int = NUMEL) -> torch.Tensor:
    return torch.ones(numel, device=NAME)


def pinned(numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device="cpu").pin_memory()


def side_stream(*, ordered: bool = True) -> SimStream:
    """A stream that goes on after all that the compute stream has been given."""
    side = SimStream()
    if ordered:
        side.wait_stream(MODULE.current_stream())
    return side


def join(side: SimStream) -> None:
    MODULE.current_stream().wait_stream(side)


@program
def read_on_a_side_stream(planted: bool) -> None:
    x = device()
    with MODULE.stream(side := side_stream(ordered=not planted)):
        y = x.sum()
    x.record_stream(side)
    join(side)
    y.record_stream(MODULE.current_stream())
    y.add_(1)


@program
def event_recorded_too_early(planted: bool) -> None:
    x, side, event = device(), side_stream(), SimEvent()
    if planted:
        event.record()
    x.add_(1)
    if not planted:
        event.record()
    side.wait_event(event)
    with MODULE.stream(side):
        x.mul_(2)
    join(side)


@program
def event_recorded_twice(planted: bool) -> None:
    """Who waits, waits for the last time that it was recorded."""
    x, side, event = device(), side_stream(), SimEvent()
    x.add_(1)
    event.record()
    if planted:
        event.record(SimStream())
    side.wait_event(event)
    with MODULE.stream(side):
        x.mul_(2)
    join(side)


@program
def event_never_recorded(planted: bool) -> None:
    x, side, event = device(), side_stream(), SimEvent()
    x.add_(1)
    if not planted:
        event.record()
    event.wait(side)
    with MODULE.stream(side):
        x.mul_(2)
    join(side)


@program
def memory_of_a_side_stream_freed_under_the_compute_stream(planted: bool) -> None:
    with MODULE.stream(side := side_stream()):
        x = device()
    join(side)
    x.add_(1)
    if not planted:
        x.record_stream(MODULE.current_stream())
    del x


@program
def record_stream_of_what_the_storage_held_before(planted: bool) -> None:
    side, x = side_stream(), device()
    storage = x.untyped_storage()
    nbytes = storage.nbytes()
    x.record_stream(side)
    storage.resize_(0)
    storage.resize_(nbytes)
    x.zero_()
    side.wait_stream(MODULE.current_stream())
    with MODULE.stream(side):
        x.add_(1)
    if not planted:
        x.record_stream(side)
    del x, storage


@program
def memory_whose_last_owner_is_still_at_work(planted: bool) -> None:
    side = side_stream()
    device().add_(1)  # freed, with its kernels under way
    y = torch.empty(NUMEL, device=NAME)
    if not planted:
        side.wait_stream(MODULE.current_stream())
    with MODULE.stream(side):
        y.zero_()
    join(side)
    y.add_(1)


@program
def storage_emptied_under_a_reader(planted: bool) -> None:
    x = device()
    side = side_stream()
    with MODULE.stream(side):
        y = x * 2
    if not planted:
        join(side)
    x.untyped_storage().resize_(0)
    join(side)
    y.record_stream(MODULE.current_stream())


@program
def memory_never_written(planted: bool) -> None:
    x = torch.empty(NUMEL, device=NAME)
    x[: NUMEL // 2].zero_()
    x[NUMEL // 2 - (not planted) :].sum()


@program
def storage_read_while_it_is_empty(planted: bool) -> None:
    x = device()
    storage = x.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    if not planted:
        storage.resize_(nbytes)
    x.add_(1)


@program
def parts_of_one_buffer_that_overlap(planted: bool) -> None:
    x = device()
    with MODULE.stream(side := side_stream()):
        x[: NUMEL // 2 + int(planted)].add_(1)
    x[NUMEL // 2 :].view(2, -1).mul_(2)
    join(side)


@program
def a_transposed_view_and_its_base(planted: bool) -> None:
    x = device().view(128, 128)
    with MODULE.stream(side := side_stream()):
        x.t().mul_(2)
    if not planted:
        join(side)
    x.flatten()[-1:].add_(1)
    join(side)


@program
def one_tensor_of_a_list(planted: bool) -> None:
    tensors = [device(), device(), device()]
    with MODULE.stream(side := side_stream()):
        torch._foreach_add_(tensors[1:], 1.0)
    tensors[1 if planted else 0].mul_(2)
    join(side)


@program
def the_out_of_an_operation(planted: bool) -> None:
    a, b, c = device(), device(), device()
    with MODULE.stream(side := side_stream()):
        torch.mul(a, 2, out=b)
    (b if planted else c).add_(1)
    join(side)


@program
def an_out_that_made_itself_room(planted: bool) -> None:
    x, side = device(), side_stream()
    y = torch.empty(0, device=NAME)
    with MODULE.stream(side):
        torch.add(x, x, out=y)  # its memory is of the side stream's pool
    join(side)
    y.add_(1)
    if not planted:
        y.record_stream(MODULE.current_stream())
    del y


@program
def a_copy_to_the_host_read_too_early(planted: bool) -> None:
    x, out, event = device(), pinned(), SimEvent()
    out.copy_(x, non_blocking=True)
    event.record()
    if not planted:
        event.synchronize()
    out.sum()


@program
def a_copy_that_nobody_asked_whether_it_is_done(planted: bool) -> None:
    x, out, event = device(), pinned(), SimEvent()
    out.copy_(x, non_blocking=True)
    event.record()
    with MODULE.stream(side := SimStream()):
        for _ in range(100):
            z = device(1 << 20)
            del z
    side.synchronize()  # so much later that it is
    assert planted or event.query()
    out.sum()


@program
def a_page_locked_source_written_again(planted: bool) -> None:
    x, source = torch.empty(NUMEL, device=NAME), pinned()
    x.copy_(source, non_blocking=True)
    if not planted:
        MODULE.synchronize()
    source.add_(1)


@program
def a_copy_of_ordinary_memory_orders_nothing_before_it(planted: bool) -> None:
    """It goes on when the driver has taken the source, which may be written at once."""
    x, out, source = device(), pinned(), torch.zeros(NUMEL, device="cpu")
    out.copy_(x, non_blocking=True)
    torch.empty(NUMEL, device=NAME).copy_(source, non_blocking=planted)
    source.add_(1)
    out.sum()


@program
def a_conversion_by_the_host(planted: bool) -> None:
    """A copy that is waited for is converted by the host before it begins, whatever the stream has still to do."""
    half = torch.float32 if not planted else torch.bfloat16
    x, middle = device(), pinned()
    middle.copy_(x, non_blocking=True)
    torch.empty(NUMEL, dtype=half, device=NAME).copy_(middle)


@program
def a_number_handed_over_with_a_launch(planted: bool) -> None:
    x, number = device(), pinned()[:1].view(())
    number.copy_(x[0], non_blocking=True)
    if not planted:
        MODULE.current_stream().synchronize()
    x.mul_(number)


@program
def lists_copied_at_once(planted: bool) -> None:
    targets, sources = [torch.empty(NUMEL, device=NAME)], [pinned()]
    torch._foreach_copy_(targets, sources, non_blocking=planted)
    sources[0].add_(1)


@program
def a_collective_that_is_not_waited_for(planted: bool) -> None:
    shard, whole = device(), torch.empty(2 * NUMEL, device=NAME)
    work = dist.all_gather_into_tensor(whole, shard, async_op=True)
    if not planted:
        work.wait()
    whole.sum()
    work.wait()


@program
def a_collective_that_one_of_two_streams_waits_for(planted: bool) -> None:
    whole = device()
    work = dist.all_reduce(whole, async_op=True)
    side = side_stream()
    work.wait()
    with MODULE.stream(side):
        if not planted:
            work.wait()
        whole.sum()
    whole.record_stream(side)


@program
def what_a_collective_reads_written_before_its_end(planted: bool) -> None:
    shard, whole = device(), torch.empty(2 * NUMEL, device=NAME)
    work = dist.all_gather_into_tensor(whole, shard, async_op=True)
    if planted:
        shard.add_(1)
    del shard  # torch holds it until somebody waits
    work.wait()


@program
def an_optimizer_s_kernel(planted: bool) -> None:
    weight = torch.nn.Parameter(device())
    weight.grad = device()
    optimizer = FusedAdam([weight], lr=0.1)
    optimizer.step()  # makes its state
    side = side_stream()
    with MODULE.stream(side):
        optimizer.step()
    if not planted:
        join(side)
    with torch.no_grad():
        optimizer.state[weight]["exp_avg"].mul_(2)
    join(side)


@program
def pinned_memory_freed_under_a_drive(planted: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine, file = AioEngine(), DirectFile(f"{folder}/file", create=True)
        buffer = pinned()
        transfer = engine.write(file, 0, buffer)
        if not planted:
            transfer.wait()
        transfer._tensor = buffer = None  # type: ignore[attr-defined, assignment]
        engine.close()


def said_of(run: Program, *, planted: bool) -> tuple[list[str], int]:
    """The problems of one, and how many pairs are without order by brute force."""
    events: list[Event] = []
    with recording(load_machine("h100"), world=2) as recorder:
        recorder.listeners.append(events.append)
        run(planted)
    return [str(problem) for problem in recorder.order.problems], len(Conflicts(events).unordered())


def raced() -> dict[str, list[tuple[list[str], int]]]:
    """Name -> what is said of the planted one and of the one in order, and how many pairs brute force finds."""
    return {name: [said_of(run, planted=planted) for planted in (True, False)] for name, run in PROGRAMS.items()}
