"""The device layer answers on every machine, and asking touches no device."""

import logging
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from deepspeed.accelerator.device import (
    Accelerator,
    NullEvent,
    NullStream,
    OnDevice,
    get_accelerator,
    set_accelerator,
    set_random_seed,
)
from deepspeed.client import legacy
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.module_inject.layers import GatherReplacedLayerParams
from deepspeed.monitor import hostmem, log, timers
from deepspeed.tier.arena import aligned_empty
from tests.harness.logs import logged


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return get_accelerator()


def test_environment_chooses(cpu: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu._name == "cpu" and get_accelerator() is cpu
    monkeypatch.setenv("DS_ACCELERATOR", "warp9")
    with pytest.raises(DeepSpeedConfigError, match="warp9"):
        get_accelerator()


def test_unusable_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.xpu.is_available():
        pytest.skip("the device is usable here")
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    with pytest.raises(DeepSpeedConfigError, match="no device that this process can use"):
        get_accelerator()


def test_set_accelerator_wins_and_can_be_undone(cpu: Accelerator) -> None:
    mine = Accelerator("cpu")
    set_accelerator(mine)
    try:
        assert get_accelerator() is mine
    finally:
        set_accelerator(None)
    assert get_accelerator() is cpu


def test_names(cpu: Accelerator) -> None:
    assert (cpu.device_name(), cpu.device_name(3), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.torch_device() == torch.device("cpu")
    cuda = Accelerator("cuda")  # asking for names must not start the device
    assert (cuda.device_name(), cuda.device_name(1)) == ("cuda", "cuda:1")
    env: dict[str, str] = {}
    cuda.set_visible_devices_envs(env, [2, 0])
    assert env == {"CUDA_VISIBLE_DEVICES": "2,0"}


def test_device_count_follows_the_launcher(cpu: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cpu.device_count() == 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert cpu.device_count() == 1


def test_streams_and_events_are_harmless_on_the_cpu(cpu: Accelerator) -> None:
    stream, event = cpu.Stream(), cpu.Event(enable_timing=True)
    assert isinstance(stream, NullStream) and isinstance(event, NullEvent)
    with cpu.stream(stream), cpu.stream(None):
        x = torch.ones(2) + 1
    stream.wait_stream(cpu.current_stream())
    event.record(stream)
    time.sleep(0.002)
    later = stream.record_event()
    stream.wait_event(later)
    assert later.query() and event.elapsed_time(later) >= 1.0
    assert x.tolist() == [2.0, 2.0]
    cpu.synchronize()
    cpu.range_push("a")
    cpu.range_pop()


def test_memory_numbers_are_this_process(cpu: Accelerator) -> None:
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    block = aligned_empty(64 * 2**20).fill_(1)  # pages of its own: the heap may have as many to spare
    assert cpu.memory_allocated() - before > 48 * 2**20
    assert cpu.max_memory_allocated() >= cpu.memory_allocated() - 2**20
    assert 0 < cpu.available_memory() <= cpu.total_memory() and cpu.product_name() == "cpu"
    assert block.sum() > 0


def test_memory_is_known_where_the_kernel_tells_little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hostmem, "ROOT", tmp_path)
    assert 0 < hostmem.rss_bytes() <= hostmem.host_total_bytes() and hostmem.peak_rss_bytes() > 0
    assert 0 < hostmem.host_available_bytes() <= hostmem.host_total_bytes()


def test_peak_can_be_reset(cpu: Accelerator) -> None:
    block = aligned_empty(256 * 2**20).fill_(1)
    high = hostmem.peak_rss_bytes()
    del block
    if not hostmem.reset_peak_rss():
        pytest.skip("this system cannot reset the peak")
    assert hostmem.peak_rss_bytes() < high - 128 * 2**20


def test_random_state_round_trip(cpu: Accelerator) -> None:
    set_random_seed(7)
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    set_random_seed(7)
    assert torch.equal(first, torch.rand(3)) and cpu.initial_seed() == 7
    assert cpu.default_generator(0) is torch.default_generator


# interface of accelerators: name, arguments and the answer on the CPU
_ON_THE_CPU = [
    ("random", (), torch.random),
    ("use_host_timers", (), True),
    ("resolves_data_dependency", (), True),
    ("handles_memory_backpressure", (), True),
    ("lazy_call", (lambda: "called",), "called"),
    ("amp", (), torch.cpu.amp),
    ("is_triton_supported", (), False),
    ("on_accelerator", (torch.ones(1),), True),
    ("on_accelerator", (torch.ones(1, device="meta"),), False),
    ("op_builder_dir", (), "deepspeed.ops.op_builder"),
]


def test_each_member_that_clients_call_answers_on_the_cpu(cpu: Accelerator) -> None:
    answers = [(name, getattr(cpu, name)(*arguments)) for name, arguments, _ in _ON_THE_CPU]
    assert answers == [(name, answer) for name, _, answer in _ON_THE_CPU]
    assert cpu.build_extension() is torch.utils.cpp_extension.BuildExtension
    values = torch.arange(4)
    assert cpu.unpin_memory(cpu.pin_memory(values)) is values and not cpu.is_pinned(values)


def test_older_names_of_memory_counters_count_the_same(cpu: Accelerator) -> None:
    assert cpu.memory_cached() == pytest.approx(cpu.memory_reserved(), rel=0.1)
    cpu.reset_max_memory_allocated()
    cpu.reset_max_memory_cached()
    assert cpu.max_memory_cached() == pytest.approx(cpu.max_memory_reserved(), rel=0.1)


def test_the_compile_backend_can_be_chosen() -> None:
    accelerator = Accelerator("cpu")
    assert accelerator.get_compile_backend() == "inductor"
    accelerator.set_compile_backend("eager")
    assert accelerator.get_compile_backend() == "eager"
    with pytest.raises(ValueError, match="no backend 'eagre'"):
        accelerator.set_compile_backend("eagre")
    assert accelerator.get_compile_backend() == "eager"


def test_seeding_reaches_numpy_where_it_is_loaded_and_needs_none(
    cpu: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_random_seed(2**32 + 5)
    drawn = np.random.random(3).tolist()
    set_random_seed(5)
    assert np.random.random(3).tolist() == drawn
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "numpy")
        set_random_seed(7)
    assert cpu.initial_seed() == 7
    probe = "import sys; sys.modules['numpy'] = None; import deepspeed; deepspeed.get_accelerator(); deepspeed.comm"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", probe], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


def test_kernel_builders_by_class_name(cpu: Accelerator) -> None:
    builder = cpu.create_op_builder("FusedAdamBuilder")
    assert builder.NAME == "fused_adam" and cpu.get_op_builder("FusedAdamBuilder") is type(builder)
    assert cpu.create_op_builder("NoSuchBuilder") is None


def test_on_device_builds_in_place() -> None:
    with OnDevice(torch.bfloat16, device="meta"):
        layer = nn.Linear(4, 4)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ZeroDivisionError), OnDevice(torch.float16):
        1 / 0  # noqa: B018
    assert nn.Linear(2, 2).weight.dtype == torch.float32
    with OnDevice(torch.float16, enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32


def test_timers(cpu: Accelerator) -> None:
    clock = timers.SynchronizedWallClockTimer()
    with pytest.raises(AssertionError, match="does not run"):
        clock("forward").stop()
    for _ in range(2):
        clock("forward").start()
        time.sleep(0.005)
        clock("forward").stop(record=True)
    assert clock.has_timer("forward") and not clock.has_timer("step")
    assert 4.0 < clock("forward").mean() < clock("forward").elapsed(reset=False)
    clock.log(["forward", "step"])
    assert clock("forward").elapsed() == 0.0


class LateDevice(Accelerator):
    """Finishes what it is given when somebody waits for it; of its time 10 ms have gone by at each event."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.recorded = self.finished = self.waits = 0

    def synchronize(self, device_index: object = None) -> None:
        raise AssertionError("the whole device is waited for")

    def Event(self, **_options: object) -> "LateEvent":  # type: ignore[override]  # noqa: N802 - torch's name
        return LateEvent(self)


class LateEvent(NullEvent):
    def __init__(self, device: LateDevice) -> None:
        self.device, self.number = device, 0

    def record(self, stream: object = None) -> None:
        self.device.recorded += 1
        self.number = self.device.recorded

    def query(self) -> bool:
        return self.number <= self.device.finished

    def synchronize(self) -> None:  # type: ignore[override]
        self.device.waits += 1
        self.device.finished = max(self.device.finished, self.number)

    def elapsed_time(self, end: "LateEvent") -> float:  # type: ignore[override]
        assert self.query() and end.query(), "a device raises"
        return (end.number - self.number) * 10.0


def test_throughput_waits_once_for_the_update_that_logs_and_loses_no_span(cpu: Accelerator) -> None:
    device, lines = LateDevice(), list[str]()
    set_accelerator(device)
    try:
        timer = timers.ThroughputTimer(batch_size=8, start_step=1, steps_per_output=4, logging_fn=lines.append)
        assert timer.avg_samples_per_sec() == float("-inf")
        for micro in range(14):  # two of each update: the eighth leaves one more span behind
            timer.start()
            timer.stop(global_step=micro % 2 == 1)
            if micro == 4:
                device.finished = device.recorded - 1  # the first of this update's is late, others are done
            assert device.waits == int(micro >= 7)
        assert len(lines) == 1 and "now 400.00, average 400.00" in lines[0]  # 8 samples in two times 10 ms
        assert (timer.global_step_count, timer.micro_step_count) == (7, 14)
        assert timer.total_elapsed_time == pytest.approx(6 * 0.02) and timer.step_elapsed_time == 0
        assert timer.avg_samples_per_sec() == pytest.approx(400) and device.waits == 2
    finally:
        set_accelerator(None)


def test_throughput_of_the_host_alone_asks_no_device(cpu: Accelerator) -> None:
    set_accelerator(device := LateDevice())
    try:
        timer = timers.ThroughputTimer(SimpleNamespace(synchronized=False), start_step=0)
        timer.start()
        time.sleep(0.002)
        timer.stop(global_step=True)
        assert timer.total_elapsed_time > 0.002 and device.recorded == 0
    finally:
        set_accelerator(None)


def test_memory_report_is_quiet_without_force(cpu: Accelerator) -> None:
    with logged(set_level=log.logger.level) as lines:  # puts back what is set inside
        log.set_log_level_from_string("info")
        timers.see_memory_usage("quiet")
        timers.see_memory_usage("after the forward", force=True)
        log.log_dist_once("only once", ranks=[0])
        log.log_dist_once("only once", ranks=[0])
    report, once = lines
    assert "after the forward: " in report and "process RSS" in report and "only once" in once
    with pytest.raises(ValueError, match="loud"):
        log.set_log_level_from_string("loud")


def test_calls_reach_the_device_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []

    def note(name: str, answer: object = None) -> object:
        return lambda *args, **kwargs: calls.append((name, *args, *kwargs.items())) or answer

    module = SimpleNamespace(
        is_available=lambda: True,
        set_device=note("set_device"),
        current_device=note("current_device", 2),
        synchronize=note("synchronize"),
        memory_allocated=note("memory_allocated", 7),
        mem_get_info=note("mem_get_info", (5, 9)),
        get_device_properties=note("get_device_properties", SimpleNamespace(total_memory=9, name="a chip")),
        device=note("device", "context"),
        default_stream=note("default_stream", "default"),
        Stream=note("Stream", "stream"),
        manual_seed_all=note("manual_seed_all"),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda name: module)
    fake = Accelerator("fake")
    fake.set_device(1)
    fake.synchronize()
    fake.manual_seed_all(3)
    assert fake.current_device_name() == "fake:2" and fake.Stream(priority=-1) == "stream"
    assert (fake.memory_allocated(), fake.available_memory(1), fake.total_memory()) == (7, 5, 9)
    assert fake.product_name() == "a chip"
    assert ("set_device", 1) in calls and ("synchronize",) in calls and ("mem_get_info", 1) in calls
    assert ("Stream", ("priority", -1)) in calls and ("get_device_properties", 2) in calls
    assert fake.device("fake:1") == "context" and ("device", "fake:1") in calls  # an index, a name or a device
    assert fake.default_stream() == "default"  # not the one that is current
    # collectives' streams go before others where there are priorities
    calls.clear()
    assert fake.urgent_stream() == "stream" and calls == [("Stream", ("priority", -1))]
    module.Stream = lambda: "one like all"
    assert fake.urgent_stream() == "one like all" and isinstance(Accelerator("cpu").urgent_stream(), NullStream)
    # what a backend lacks is replaced, not a crash
    fake.empty_cache()
    assert fake.memory_reserved() == 0 and isinstance(fake.Event(), NullEvent) and not fake.is_bf16_supported()
    with fake.stream(fake.current_stream()):
        pass


def test_a_host_sleeps_until_an_event_comes_where_the_device_can_wake_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_timed(enable_timing: bool = False) -> str:  # noqa: FBT001, FBT002 - as torch.xpu has it
        return "spins"

    for event, made in ((lambda **flags: flags, {"blocking": True}), (only_timed, "spins")):
        monkeypatch.setattr(torch, "get_device_module", lambda name, event=event: SimpleNamespace(Event=event))
        assert Accelerator("fake").awaited_event() == made
    assert Accelerator("cpu").awaited_event().query()


def test_missing_parts_say_so() -> None:
    for make in (legacy.FP16_Optimizer, legacy.BF16_Optimizer):
        assert not isinstance(object(), make)
        with pytest.raises(NotImplementedError, match=make.__name__):
            make(1, size=2)
    with GatherReplacedLayerParams([], nn.Linear(1, 1), enabled=True):
        pass


def test_log_lines_name_who_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    monkeypatch.setattr(log.logger, "handlers", [handler])
    monkeypatch.setattr(log.logger, "level", logging.INFO)
    for write in (log.log_dist, log.log_dist_once, log.print_dist, log.warning_once):
        write(f"from {write.__name__}")
    timers.see_memory_usage("from memory", force=True)
    assert [(record.filename, record.funcName) for record in found] == [
        ("test_device.py", "test_log_lines_name_who_wrote_them")
    ] * 5
