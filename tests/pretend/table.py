"""What is tried on the device that pretends: names only, for processes that have it and for those that have not."""

ORDERS = ("late", "sides", "random")
# Name -> (stage, name of an addition to the zero block in tests/gpu/test_offload_cuda.py).
PLACES: dict[str, tuple[int, str]] = {
    "0": (0, "none"), "1": (1, "none"), "2": (2, "none"), "3": (3, "none"), "2 optimizer": (2, "optim cpu"),
    "2 unpinned": (2, "optim cpu, unpinned"), "3 both": (3, "both cpu"), "3 parameters": (3, "param cpu"),
    "3 half": (3, "half cpu"), "3 travelling": (3, "half cpu, travelling"), "2 early": (2, "optim cpu, early"),
    "3 drive": (3, "both nvme"), "3 no overlap": (3, "no overlap"),
}  # fmt: skip
# Updates that go on beside later steps have numbers of their own, the same in every order, after so many steps.
LATE_STEPS = 8
LATE: dict[str, tuple[int, str]] = {
    f"{stage} {name}": (stage, name)
    for name in ("delayed", "zenflow", "zenflow at once", "zenflow every step")
    for stage in (1, 2, 3)
} | {"3 delayed, both": (3, "delayed, both")}
# A wait of the package, named as in tests/sim/unseen.py -> the place that sees its loss.
PLANTED: dict[str, str] = {
    "tier.store:wait: event.synchronize()": "2 early",
    "tier.store:__init__: self._event.record(get_accelerator().cur...": "2 early",
    "zero.gradients:_land: transfer.wait()": "2 optimizer",
    "zero.unit:_finish_fetch: self._transfer.wait()": "3 both",
    "comm.collectives:wait: get_accelerator().current_stream().wait_...": "3",
    "comm.collectives:run: self._stream.wait_stream(accelerator.cur...": "3",
    "comm.collectives:run: event.record(self._stream)": "3",
    "comm.collectives:run: transfer.wait()": "3",
    "tier.behind:take: event.record(worker.stream)": "2 optimizer",
    "tier.behind:take: self._call().wait()": "2 optimizer",
    "tier.behind:wait: stream.wait_event(self._event)": "2 optimizer",
    "zero.update.speculative:compute: self._landed.wait()": "2 early",
    "zero.update.late:turn: begun.after.wait()": "2 delayed",
    "zero.update.selective.policy:_write_chosen: masters.wait()": "2 zenflow at once",
    "zero.update.staged:_states_of: visit.coming.wait()": "3 travelling",
}
_FILE = "tests/gpu/test_offload_cuda.py"
GPU_FILES: dict[str, list[str]] = {
    "quick": [
        "tests/gpu/test_device.py",
        _FILE,
        "-k",
        "test_device or destroyed or resumed or (rest_where and both and bf16)",
    ],
    "steps": ["tests/gpu/test_steps_cuda.py"],
    "offload numbers": [_FILE, "-k", "follows or kernels or travel or accumulates or ahead or columns"],
    "late updates": [_FILE, "-k", "who_looks"],
    "offload places": [_FILE, "-k", "rest_where or takes or lent or born or fit or limit or destroyed"],
}
