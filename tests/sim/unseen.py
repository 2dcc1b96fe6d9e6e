"""The calls that order: which case of the matrix sees that one is missing, and why nothing can see it of the others.

A call is named "module:function: text". The check of order sees accesses to memory that may happen in either order. It
cannot see a wait that changes values only, one that some later wait covers, and what no simulated run reaches: messages
between ranks in host memory, errors, and drives that a save reads in its thread. That a side stream is entered at all
(``with accelerator.stream`` in SideStream.run) is for speed: on the compute stream everything would be in order too.
"""

SEEN: dict[str, str] = {
    "comm.collectives:wait: work.wait()": "stage1",
    "comm.collectives:wait: get_accelerator().current_stream().wait_...": "stage1",
    "comm.collectives:run: self._stream.wait_stream(accelerator.cur...": "stage1",
    "comm.collectives:run: transfer.wait()": "stage1",
    "comm.collectives:run: event.record(self._stream)": "stage1",
    "comm.collectives:run: accelerator.current_stream().wait_stream...": "failing-on-host",
    "zero.runtime:need: unit.arrive()": "stage3",
    "zero.runtime:_discard: unit.arrive()": "skipping",
    "zero.publish:finish: transfer.wait()": "stage1",
    "zero.publish:finish: self._gathers.run(unit.start_gather).wai...": "held",
    "zero.publish:_publish: transfer.wait()": "hpz",
    "zero.publish:_publish: collectives.all_gather(gathered, piece.t...": "hpz-parameters-on-host",
    "zero.unit:fetch: self.arrive()": "failing-on-host",
    "zero.unit:arrive: self._transfer.wait()": "stage3",
    "zero.unit:fetch_whole: self.arrive()": "stage3",
    "zero.gradients:_land: transfer.wait()": "stage0",
    "zero.gradients:leave: transfer.wait()": "stage2-optimizer-on-host",
    "zero.gradients:show: self.land_all()": "reading-at-stage0",
    "zero.gradients:settle: self.land_all()": "looking",
    "zero.gradients:collapse: self._land_all()": "stage1",
    "zero.gradients:clear: self._land_all()": "leaving",
    "zero.gradients:_zero: self._land_all()": "skipping-on-host",
    "zero.gradients:land_all: self._land_all()": "looking",
    "zero.optim_view:gradient: self.unit.landed.wait()": "both-on-host-unchecked",
    "zero.unit:values: self.landed.wait()": "setting-on-host",
    "zero.gradients:_continued: before.wait()": "mics",
    "zero.optim_view:show: transfer.wait()": "optimizer-on-drive",
    "zero.client.safe_state:_opened: runtime.gradients.settle()": "looking",
    "zero.client.safe_state:safe_set_local_fp32_param: unit.publish_part(master.segment.offset ...": "setting-on-drive",
    "tier.drive:put: round_into(inside, values[lo - start:hi ...": "drive",
    "zero.runtime:attached: self.before_update()": "slots",
    "zero.unit:values: keeper.before_update()": "writing",
    "zero.step:take_step: runtime.before_update()": "saving",
    "zero.step:__init__: self._event.record()": "asking",
    "zero.step:_read: self._event.synchronize()": "asking",
    "checkpoint.save.copies:take: self._event.synchronize()": "copies",
    "checkpoint.save.copies:take: self._stream.wait_stream(accelerator.cur...": "saving",
    "checkpoint.save.copies:take: self._event.record(self._stream)": "saving",
    "checkpoint.save.copies:before_update: get_accelerator().current_stream().wait_...": "saving",
    "checkpoint.save.copies:arrive: self._event.synchronize()": "sooner",
    "tier.arena:_reclaim: get_accelerator().synchronize()": "arena",
    "tier.drive:read: self._drive.read(self._extent, start, ou...": "drive",
    "tier.drive:get: self._wait_for_writes(start, start + out...": "drive",
    "tier.drive:_load: self._wait_for_writes(start, end)": "drive",
    "tier.drive:_load: piece.transfer.wait()": "drive",
    "tier.drive:_write: self._wait_for_writes(start, stop)": "drive",
    "tier.drive:settle: self._wait_for_writes(0, self.numel)": "drive",
    "tier.drive:hold: self.settle()": "drive",
    "tier.drive:drop: self.settle()": "drive",
    "tier.drive:_wait_for_writes: entry[0].wait()": "drive",
    "tier.staging:_retire: transfer.wait()": "optimizer-on-drive",
    "tier.store:__init__: self._event.record(get_accelerator().cur...": "drive",
    "tier.store:wait: event.synchronize()": "drive",
    "tier.transfer:wait: transfer.wait()": "drive",
    "tier.aio:close: transfer.settle()": "drive",
    "tier.aio:wait: self.settle()": "drive",
    "tier.aio:close: transfer.settle() (2)": "drive",
    "engine_weights:offload_states: self.runtime.gradients.land_all()": "looking",
    "zero.unit:settle_states: self.settle(stepping=stepping)": "saving-both-on-host",
    "zero.unit:settle: self._updating.wait()": "saving-both-on-host",
    "zero.unit:settle: self.arrive()": "single-stage2-on-host-unchecked",
    "zero.unit:start_gather: self._updating.wait()": "both-on-host-unchecked",
    "tier.behind:take: self._call().wait()": "skipping-on-host",
    "tier.behind:take: event.record(worker.stream)": "skipping-on-host",
    "tier.behind:wait: stream.wait_event(self._event)": "skipping-on-host",
    "zero.update.early:compute: self._landed.wait()": "single-early-on-host",
    "zero.update.visits:on_device: visit.coming.wait()": "slots-visiting-on-host",
    "zero.update.visits:expected: self._home_again.wait()": "slots-visiting-on-host",
}

_SAVES = "the thread of a save, which reads what is kept for it; tests/ops/test_held.py"
_DOOR = (
    "the simulated worker has done its part when it is handed over, and later waits of the same step cover it; "
    "test_update_behind.py::test_every_door_waits"
)
# "not reached: " begins the reason where no case comes to the call. A test that its loss turns red is named.
UNSEEN: dict[str, str] = {
    "comm.collectives:merge: Collective(works, then=(end,)).wait()": (
        "not reached: a message between the programs, in host memory over gloo; test_agreement_cost.py hangs"
    ),
    "comm.collectives:break_off: work.wait(timedelta(milliseconds=1))": (
        "not reached: ends the waits of programs one of which has failed; tests/dist/test_failures_of_one_rank.py"
    ),
    "zero.runtime:_forget_vacant: self.gradients.land_all()": (
        "ranks that differ: what guests have made is dropped, of which there is nothing in one process; without it a "
        "gradient that no rank had would go before it has landed"
    ),
    "zero.runtime:_gather: unit.arrive()": (
        "a later wait covers it: the second gather travels on the same stream, and is waited for on the next line"
    ),
    "zero.runtime:_gather: self._stream.run(functools.partial(unit....": (
        "what is gathered for others goes to memory that nobody reads; without it that would be given away too early"
    ),
    "zero.publish:_publish: transfer.wait() (2)": (
        "not reached: PARAM on a drive is in host memory here, and only ranks on the CPU gather it there behind; "
        "test_offload_parity.py::test_four_ranks[hpz]"
    ),
    "zero.unit:start_gather: rest.get(piece).wait()": (
        "ordered already: what comes to a device has arrived, or comes by the stream; on the CPU drives are read "
        "behind; test_offload_parity.py::test_four_ranks"
    ),
    "tier.store:settled: place.put(values).wait()": (
        "a later wait covers it: the host looks at a state first in the update, after the gradients' copies"
    ),
    "zero.unit:settle_states: self._delayed.wait()": f"not reached: no case delays its updates. Else {_DOOR}",
    "zero.unit:settle_states: self.landed.wait()": "not reached: no case writes to masters; test_pretend.py",
    "zero.runtime:gather_gradients: self.settle(stepping=True)": _DOOR,
    "zero.unit:values: self.settle()": _DOOR,
    "zero.unit:widen_gradient: self.settle()": f"not reached: gradients that are read early. Else {_DOOR}",
    "zero.update.early:_result: self.turn.wait()": (
        "the thread, which asks itself, has taken it; tests/dist/test_offload_early.py, whose steps come too early"
    ),
    "zero.unit:forget_update: self.settle()": _DOOR,
    "zero.gradients:reduce: unit.settle()": _DOOR,
    "zero.gradients:_zero: unit.settle()": _DOOR,
    "tier.behind:forget: self._last.wait()": _DOOR,
    "engine_weights:offload_states: self.runtime.settle()": _DOOR,
    "engine:_end_update: self.runtime.settle()": _DOOR,
    "engine_weights:settle_weights: self.runtime.settle()": _DOOR,
    "zero.runtime:begin_backward: unit.settle()": "not reached: a graph from before an update; test_offload_delayed.py",
    "zero.runtime:need: unit.settle()": f"not reached: parameters that stay in a client's context. Else {_DOOR}",
    "zero.runtime:publish: self.settle()": f"not reached: no case loads a checkpoint. Else {_DOOR}",
    "tier.behind:_until_ended: self._ended.wait()": "not reached: in its place the program waits for a stream",
    "tier.behind:__init__: self._begin.record(self._home)": (
        "ordered already: the update waits for the gradient, which comes behind all kernels that read the weights"
    ),
    "tier.behind:take: worker.stream.wait_event(self._begin)": "as tier.behind:__init__",
    "zero.gradients:_rest: self._land_all()": (
        "values: the sum that is on its way would be lost, the copies themselves are ordered by their stream; "
        "test_offload_parity.py::test_models[single]"
    ),
    "zero.gradients:_rest: store.get(target.memory).wait()": (
        "ordered already: what comes to a device has arrived, or comes by the stream; on the CPU drives are read "
        "behind; test_offload_parity.py::test_every_way_on_one_rank[wide_accumulation-bf16]"
    ),
    "zero.gradients:_land: written.wait()": (
        "not reached: gradients go to a drive only where host memory is short; such a write waits for its copy itself"
    ),
    "zero.gradients:land_all: unit.landed.wait()": (
        "a later wait covers it: who opens a gradient waits too, and a save reads those of open windows, all landed"
    ),
    "zero.unit:outbox: self.landed.wait()": (
        "a later wait covers it: the update has waited for the gradient, but of units in no group of the optimizer"
    ),
    "zero.gradients:withdraw: self.land_all()": (
        "values: what a client put in the place of a gradient; reductions have landed when gradients are shown; "
        "test_gradients_by_hand.py::test_edits_of_a_shown_gradient_count"
    ),
    "zero.optim_view:let_go: transfer.wait()": (
        "a later wait covers it: after an update that failed nobody takes the buffer until the drive is closed"
    ),
    "tier.arena:__del__: get_accelerator().synchronize()": (
        "not reached: the simulator's pages wait alike, which is planted in matrix.py; "
        "test_arena.py::test_closing_gives_back_what_is_free_and_the_rest_with_its_last_user"
    ),
    "engine_weights:offload_states: self.runtime.before_update()": (
        "memory: what the copies read is theirs until then, and would not leave the device; nobody writes it"
    ),
    "tier.drive:wait: self._released.wait(seconds)": _SAVES,
    "tier.drive:_write: self._wait_for_readers()": _SAVES,
    "tier.drive:drop: self._wait_for_readers()": _SAVES,
    "tier.drive:_wait_for_readers: reader.wait(_GLANCE_S)": _SAVES,
    "tier.drive:read_ahead: self.settle()": (
        "ordered already: every write has ended, and it raises what failed; "
        "test_staging_and_stored.py::test_a_failed_write_is_told_whenever_the_values_are_wanted"
    ),
    "tier.drive:_heal: entry[0].wait()": "ordered already: the write has ended; it takes note of how",
    "tier.staging:clear: self.settle()": "a later wait covers it: the engine, which is closed next, waits for the same",
    "tier.aio:_start: transfer.settle()": (
        "ordered already: the transfer has ended, and it lets go of its memory; "
        "test_aio_engine.py::test_done_without_waiting"
    ),
}

# Modules whose waits are no matter of streams: how their names begin -> what they wait for.
OUTSIDE: dict[str, str] = {
    "timeline": "what is recorded of a run, whose events nobody's memory depends on",
    "engine_elastic": "decides what is saved; saves order themselves",
    "profiling.flops_profiler": "waits for the device to tell times",
    "zero.update.delayed": "not taken out one by one; the matrix has late updates, on a slow bus too",
    "zero.update.zenflow": "as for delayed",
    "simulate.": "the simulator itself",
    "device": "the events of a host that is its own device",
    "bench.": "measurements of drives",
    "checkpoint.": "files, of bytes that simulated tensors have not got; tests/dist/test_checkpoint_*",
    "engine_checkpoint": "as checkpoint; what it does first is in engine_weights.offload_states too",
    "reallocate.": "messages between ranks in host memory; tests/dist/test_reallocate.py",
    "comm.calls": "the clients' own collectives, and clocks",
    "comm.differentiable": "collectives of layers in parts, on the compute stream; tests/dist/test_tensor_parallel.py",
    "comm.init": "the end of other processes",
    "comm.trace": "clocks",
    "launcher.": "processes",
    "mesh.groups": "the end of other processes",
    "native.": "compilers",
    "observe.": "clocks",
    "zero.update.rates": "measurements, before there are states",
    "pipe.": "not taken out one by one; tests/sim/test_pipelines.py, tests/dist/test_pipeline_*",
    "tensor.": "as comm.differentiable",
    "zero.hooks": "a unit's update is waited for before a module runs; tests/dist/test_update_behind.py",
    "zero.param": "and where a parameter is read by itself; there too",
    "zero.failures": "the end of what waits for a program that has failed",
    "comm.hang": "threads that watch, on a clock",
    "zero.client.mapped": "values of files, which simulated tensors have not; tests/dist/test_weights_from_files.py",
    "zero.client.incoming": "as zero.client.mapped",
    "zero.client.gathered": "what each gather waits for by itself, so that all ranks hear how it has ended",
    "tier.aio_handle": "files of clients, through an engine of IO that is looked at",
}
