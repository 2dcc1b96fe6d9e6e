"""The calls that order: which case of the matrix sees that one is missing, and why nothing can see it of the others.

A call is named "module:function: text". The check of order sees accesses to memory that may happen in either order. It
cannot see a wait that changes values only, one that some later wait covers, and what no simulated run reaches: messages
between ranks in host memory, errors, and drives that a save reads in its thread. That a side stream is entered at all
(``with accelerator.stream`` in SideStream.run) is for speed: on the compute stream everything would be in order too.
"""

SEEN: dict[str, str] = {
    "zero.runtime:_gather: self._stream.run(functools.partial(unit....": "serving",
    "zero.gradients:_rest: self._land_all()": "stage2-optimizer-on-host-accumulated",
    "tier.store:settled: place.put(values).wait()": "setting-on-host",
    "tier.behind:__init__: self._begin.record(self._home)": "single-stage2-on-host-unchecked",
    "tier.behind:take: worker.stream.wait_event(self._begin)": "single-stage2-on-host-unchecked",
    "comm.collectives:wait: work.wait()": "stage1",
    "comm.collectives:wait: get_accelerator().current_stream().wait_...": "stage1",
    "comm.collectives:broadcast: start_broadcast(tensor, group, source=so...": "stage0",
    "comm.collectives:run: self._stream.wait_stream(accelerator.cur...": "stage1",
    "comm.collectives:run: transfer.wait()": "stage1",
    "comm.collectives:run: event.record(self._stream)": "stage1",
    "comm.collectives:run: accelerator.current_stream().wait_stream...": "failing-on-host",
    "zero.gradients:_land: transfer.wait()": "stage0",
    "zero.gradients:leave: transfer.wait()": "stage2-optimizer-on-host",
    "zero.gradients:show: self.land_all()": "reading-at-stage0",
    "zero.gradients:settle: self.land_all()": "looking",
    "zero.gradients:collapse: self._land_all()": "stage1",
    "zero.gradients:clear: self._land_all()": "leaving",
    "zero.gradients:_zero: self._land_all()": "skipping-on-host",
    "zero.gradients:land_all: self._land_all()": "looking",
    "zero.gradients:_continued: before.wait()": "mics",
    "client.zero.safe_state:_opened: runtime.gradients.settle()": "looking",
    "client.zero.safe_state:safe_set_local_fp32_param: unit.publish_part(master.segment.offset ...": "setting-on-drive",
    "tier.drive:put: round_into(inside, values[lo - start:hi ...": "drive",
    "zero.runtime:attached: self.before_update()": "slots",
    "zero.unit:values: keeper.before_update()": "writing",
    "zero.step:take_step: runtime.before_update()": "saving",
    "checkpoint.save.content:take: self._event.synchronize()": "copies",
    "checkpoint.save.content:take: self._stream.wait_stream(accelerator.cur...": "saving",
    "checkpoint.save.content:take: self._event.record(self._stream)": "saving",
    "checkpoint.save.content:before_update: get_accelerator().current_stream().wait_...": "saving",
    "checkpoint.save.content:arrive: self._event.synchronize()": "sooner",
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
    "tier.staging:_retire: transfer.wait()": "torn-on-drive",
    "tier.store:__init__: self._event.record(get_accelerator().cur...": "drive",
    "tier.store:wait: event.synchronize()": "drive",
    "tier.transfer:wait: transfer.wait()": "drive",
    "tier.aio:close: transfer.settle()": "drive",
    "tier.aio:wait: self.settle()": "drive",
    "tier.aio:close: transfer.settle() (2)": "drive",
    "engine.weights:offload_states: self.runtime.gradients.land_all()": "looking",
    "tier.behind:take: self._call().wait()": "skipping-on-host",
    "tier.behind:take: event.record(worker.stream)": "skipping-on-host",
    "tier.behind:wait: stream.wait_event(self._event)": "skipping-on-host",
    "zero.runtime:need: unit.wait(StateKind.PARAM) (2)": "stage3",
    "zero.runtime:_discard: unit.wait(StateKind.PARAM)": "skipping",
    "zero.unit:values: self.wait(kind, write=write)": "setting-on-host",
    "zero.unit:fetch: self._finish_fetch()": "failing-on-host",
    "zero.unit:_finish_fetch: self._transfer.wait()": "stage3",
    "zero.unit:wait: self.pending.wait(kind, write=write, cop...": "both-on-host-unchecked",
    "zero.unit:wait: self._finish_fetch()": "stage3",
    "zero.unit:start_gather: self.pending.wait(StateKind.PARAM)": "optimizer-on-host",
    "zero.unit:fetch_whole: self.wait(StateKind.PARAM)": "stage3",
    "zero.gradients:reduce: unit.wait(StateKind.GRAD, write=True, co...": "zenflow-on-host",
    "zero.gradients:land_all: unit.wait(StateKind.GRAD, write=True)": "slots-delayed-on-host-accumulated",
    "tier.transfer:wait: entry.work.wait()": "optimizer-on-host",
    "engine.engine:_end_update: self.runtime.update.wait()": "stage2-optimizer-on-host-unchecked",
    "zero.update.publish:finish: transfer.wait()": "stage1",
    "zero.update.publish:finish: self._gathers.run(unit.start_gather).wai...": "held-both-on-host",
    "zero.update.publish:_publish: transfer.wait()": "hpz",
    "zero.update.publish:_publish: collectives.all_gather(gathered, piece.t...": "hpz-parameters-on-host",
    "zero.update.result:__init__: self._event.record()": "stage0",
    "zero.update.result:_read: self._event.synchronize()": "asking",
    "zero.update.policy:wait: unit.wait(StateKind.OPTIM, write=True)": "stage2-optimizer-on-host-unchecked",
    "zero.update.tiled:show: transfer.wait()": "stage1-optimizer-on-drive",
    "zero.update.staged:_states_of: visit.coming.wait()": "slots-visiting-on-host",
    "zero.update.speculative:compute: self._landed.wait()": "single-early-on-host",
    "zero.update.late:turn: begun.after.wait()": "delayed-on-host-unchecked-slow",
    "zero.update.late:_until_ended: Several([begun.turn for begun in self._b...": "delayed-on-host",
    "zero.update.selective.policy:_until_all_ended: Several([*(begun.turn for begun in self....": (
        "zenflow-on-host-unchecked-slow"
    ),
    "zero.update.selective.policy:_add: landed.wait()": "zenflow-on-host-unchecked-slow",
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
    "zero.unit:start_gather: rest.get(piece).wait()": (
        "ordered already: what comes to a device has arrived, or comes by the stream; on the CPU drives are read "
        "behind; test_offload_parity.py::test_four_ranks"
    ),
    "tier.behind:forget: self._last.wait()": _DOOR,
    "zero.sync.order:forget_vacant: self._gradients.land_all()": (
        "ranks that differ: what dummies have made is dropped, of which there is nothing in one process; without it a "
        "gradient that no rank had would go before it has landed"
    ),
    "zero.runtime:_gather: unit.wait(StateKind.PARAM)": (
        "a later wait covers it: the second gather travels on the same stream, and is waited for on the next line"
    ),
    "zero.update.publish:_publish: transfer.wait() (2)": (
        "not reached: PARAM on a drive is in host memory here, and only ranks on the CPU gather it there behind; "
        "test_offload_parity.py::test_four_ranks[hpz]"
    ),
    "zero.runtime:attached: view.unit.wait(StateKind.OPTIM, write=Tr...": _DOOR,
    "zero.runtime:gather_gradients: self.update.begin_step()": _DOOR,
    "zero.update.inline:begin_step: turn.wait()": _DOOR,
    "zero.update.inline:begin_step: super().begin_step()": "no wait: the base class notes that nobody has to",
    "zero.update.tiled:begin_step: turn.wait()": _DOOR,
    "zero.update.tiled:begin_step: super().begin_step()": "as zero.update.inline:begin_step",
    "zero.unit:values: self.wait(StateKind.PARAM)": _DOOR,
    "zero.unit:widen_gradient: self.wait(StateKind.GRAD, write=True)": (
        f"not reached by an update: gradients that are read early. Else {_DOOR}"
    ),
    "zero.unit:forget_pending: self._finish_fetch()": _DOOR,
    "zero.gradients:_zero: unit.wait(StateKind.GRAD, write=True, co...": _DOOR,
    "client.zero.safe_state:_opened: runtime.update.wait_together(groups=grou...": (
        f"not reached: states that several ranks answer for. Else {_DOOR}"
    ),
    "engine.checks:begin_collective: self._runtime.update.wait_together()": _DOOR,
    "engine.engine:_end_update: self.runtime.update.end_updates()": "no wait: forgets what the line before waited for",
    "engine.weights:offload_states: self.runtime.update.wait()": _DOOR,
    "engine.weights:settle: self.runtime.update.wait()": f"not reached: whole weights. Else {_DOOR}",
    "zero.update.policy:wait_together: unit.wait(StateKind.PARAM)": _DOOR,
    "zero.update.policy:wait_together: self.wait()": _DOOR,
    "zero.runtime:begin_backward: unit.wait(StateKind.PARAM)": (
        "a later wait covers it: a graph from before an update; test_offload_delayed.py"
    ),
    "zero.runtime:need: unit.wait(StateKind.PARAM)": f"parameters that stay in a client's context. Else {_DOOR}",
    "zero.runtime:publish: self.update.wait()": f"not reached: no case loads a checkpoint. Else {_DOOR}",
    "zero.unit:outbox: self.wait(StateKind.GRAD, write=True)": (
        "a later wait covers it: the update has waited for the gradient, but of units in no group of the optimizer"
    ),
    "zero.optim_view:gradient: self.unit.wait(StateKind.GRAD)": (
        "a later wait covers it: what is rounded goes into the gradient's memory, and waits for the same (Unit.outbox)"
    ),
    "zero.update.tiled:let_go: transfer.wait()": (
        "a later wait covers it: after an update that failed nobody takes the buffer until the drive is closed"
    ),
    "zero.update.staged:_expected: self._home_again.wait()": (
        "a later wait covers it: every door waits for what the unit has noted; without it a client who reads "
        "optimizer.state itself would be too early"
    ),
    "zero.update.staged:_measure: get_accelerator().synchronize()": "not reached: measures before there are states",
    "zero.update.staged:_measure: get_accelerator().synchronize() (2)": "not reached: as the first",
    "zero.update.speculative:_result: self.turn.wait()": (
        "the thread, which asks itself, has taken it; tests/dist/test_offload_early.py, whose steps come too early"
    ),
    "zero.update.late:begin_step: super().begin_step()": "no wait: late updates have ended before",
    "zero.update.late:_update_watched: Several([begun.after for begun in self._...": (
        "not reached: hooks of the user's on the optimizer; tests/dist/test_offload_delayed.py"
    ),
    "zero.update.late:publish: self.wait_together()": _DOOR,
    "zero.update.late:restart: self.wait()": f"not reached: no case loads a checkpoint. Else {_DOOR}",
    "zero.update.selective.policy:wait: super().wait()": _DOOR,
    "zero.update.speculative:wait: self.turn.wait()": "as zero.update.speculative:_result",
    "zero.update.selective.policy:_write_chosen: masters.wait()": (
        "ordered already: both copies go by the stream of what goes up; of the host's copies tests/pretend is the proof"
    ),
    "zero.update.selective.policy:_until_added: self._adding.pop(unit, ARRIVED).wait()": (
        "a later wait covers it: the thread adds and updates in turn, and the window's end waits for all that it has"
    ),
    "zero.update.selective.policy:_update_chosen: unit.wait(StateKind.GRAD)": (
        "not reached by need: the columns have been taken on the device, as the gradient passed"
    ),
    "zero.update.selective.policy:_square_all: unit.wait(StateKind.GRAD)": (
        "not reached: squares of columns are summed on the device, as the gradient passes"
    ),
    "zero.update.selective.policy:_put_home: view.unit.wait(StateKind.OPTIM, write=Tr...": _DOOR,
    "zero.update.selective.policy:publish: self.wait_together()": _DOOR,
    "tier.behind:_until_ended: self._ended.wait()": "not reached: in its place the program waits for a stream",
    "zero.gradients:_rest: store.get(target.memory).wait()": (
        "not reached: gradients that come back from a drive; what comes to a device comes by its stream, and on the "
        "CPU test_offload_parity.py::test_every_way_on_one_rank[wide_accumulation-bf16] sees it"
    ),
    "zero.gradients:_land: written.wait()": (
        "not reached: gradients go to a drive only where host memory is short; such a write waits for its copy itself"
    ),
    "zero.gradients:withdraw: self.land_all()": (
        "values: what a client put in the place of a gradient; reductions have landed when gradients are shown; "
        "test_gradients_by_hand.py::test_edits_of_a_shown_gradient_count"
    ),
    "tier.arena:__del__: get_accelerator().synchronize()": (
        "not reached: the simulator's pages wait alike, which is planted in matrix.py; "
        "test_arena.py::test_closing_gives_back_what_is_free_and_the_rest_with_its_last_user"
    ),
    "engine.weights:offload_states: self.runtime.before_update()": (
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
    "profiling.timeline": "what is recorded of a run, whose events nobody's memory depends on",
    "client.elastic": "decides what is saved; saves order themselves",
    "profiling.flops_profiler": "waits for the device to tell times",
    "client.zero.optimizer": "what each call waits for by itself; tests/dist/test_update_behind.py",
    "accelerator.device": "the events of a host that is its own device",
    "tools.": "the simulator itself, measurements and checks, which stand beside the runtime",
    "checkpoint.": "files, of bytes that simulated tensors have not got; tests/dist/test_checkpoint_*",
    "engine.checkpoint": "as checkpoint; what it does first is in engine.weights.offload_states too",
    "reallocate.": "messages between ranks in host memory; tests/dist/test_reallocate.py",
    "client.comm.calls": "the clients' own collectives, and clocks",
    "comm.init": "the end of other processes",
    "client.comm.comms_log": "clocks",
    "client.comm.faults": "the end of other processes",
    "launcher.": "processes",
    "comm.mesh.groups": "the end of other processes",
    "accelerator.native.": "compilers",
    "monitor.": "clocks",
    "pipe.": "not taken out one by one; tests/sim/test_pipelines.py, tests/dist/test_pipeline_*",
    "tensor.": "collectives of layers in parts, on the compute stream; tests/dist/test_tensor_parallel.py",
    "zero.hooks": "a unit's update is waited for before a module runs; tests/dist/test_update_behind.py",
    "zero.param": "and where a parameter is read by itself; there too",
    "comm.row_exchange": "collectives of layers, on the compute stream; tests/dist/test_experts.py, test_ring.py",
    "moe.exchange": "what travels beside the dense branch; tests/dist/test_experts_runtime.py",
    "sequence.": "not taken out one by one; planted faults of tests/sim/matrix.py, tests/dist/test_sequence.py",
    "zero.sync.failures": "the end of what waits for a program that has failed",
    "comm.hang": "threads that watch, on a clock",
    "zero.module.mapped": "values of files, which simulated tensors have not; tests/dist/test_weights_from_files.py",
    "client.zero.incoming": "as zero.module.mapped",
    "client.zero.gathered": "what each gather waits for by itself, so that all ranks hear how it has ended",
    "client.aio_handle": "files of clients, through an engine of IO that is looked at",
}
