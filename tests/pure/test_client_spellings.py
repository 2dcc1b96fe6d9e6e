"""What programs written for DeepSpeed spell, ask and import: the same here, or refused with a sentence."""

import importlib
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfigError, load_config
from deepspeed.config.model.settings import inert_notes
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split_groups
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config, get_bfloat16_config
from deepspeed.runtime.utils import clip_grad_norm_, get_global_norm, prefix_sum_inc
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.comms_logging import CommsLogger
from tests.harness.rows import for_each


def _load(**keys: Any) -> Any:
    return load_config({"train_batch_size": 1} | keys, world_size=1)


@pytest.mark.parametrize("number", [0, 1])
def test_booleans_may_be_zero_and_one(number: int) -> None:
    config = _load(
        zero_allow_untested_optimizer=number,
        wall_clock_breakdown=number,
        bf16={"enabled": number},
        zero_optimization={"stage": 2, "cpu_offload": number},
    )
    assert config.wall_clock_breakdown is config.bf16.enabled is bool(number)
    assert (config.zero.offload_optimizer is not None) is bool(number)


def test_torch_adam_beside_params_has_no_effect_and_says_so() -> None:
    config = _load(optimizer={"type": "Adam", "params": {"lr": 1}, "torch_adam": True})
    assert any("optimizer.torch_adam (it is read inside optimizer.params)" in note for note in inert_notes(config))


@for_each(("stage", "device"), [(stage, device) for stage in range(3) for device in ("cpu", "nvme")])
def test_offload_param_below_the_stage_that_shards_parameters_has_no_effect(stage: int, device: str) -> None:
    config = _load(zero_optimization={"stage": stage, "offload_param": {"device": device}})
    assert config.zero.param_tier.value == "none"
    assert f"zero_optimization.offload_param (stage {stage} does not shard parameters)" in inert_notes(config)


def test_blocks_that_programs_build() -> None:
    zero = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=7, offload_param={"device": "cpu"})
    assert (zero.stage, zero.prefetch_bucket_size, zero.offload_param.device.value) == (3, 7, "cpu")
    others = (DeepSpeedZeroConfig(stage=2), DeepSpeedZeroConfig(stage=2, overlap_comm=True))
    assert [each.overlap_comm for each in (zero, *others)] == [True, False, True]
    block = DeepSpeedZeroOffloadParamConfig(device="cpu", pin_memory=True)
    assert DeepSpeedZeroConfig(stage=3, offload_param=block).offload_param.pin_memory is True
    assert DeepSpeedFP16Config(enabled=True).initial_scale_power == 16
    assert DeepSpeedBF16Config(enabled=True).enabled
    assert [get_bfloat16_config(each).enabled for each in ({"bf16": {"enabled": 1}}, {"bfloat16": {}}, {})] == [1, 0, 0]
    with pytest.raises(DeepSpeedConfigError, match="did you mean 'stage'"):
        DeepSpeedZeroConfig(stagee=3)


def test_lines_of_a_hostfile_and_ranges() -> None:
    """What is wrong with a hostfile, test_launcher_resources.py shows."""
    runner = importlib.import_module("deepspeed.launcher.runner")
    assert runner._parse_hostfile(["# hosts", "one slots=2", "", "two slots=4"]) == {"one": 2, "two": 4}
    assert runner.parse_range_list("4,0-2,1") == [0, 1, 2, 4]
    for wrong in ("", "a", "3-1", "1-", "-1", "1,,2"):
        with pytest.raises(DeepSpeedConfigError, match="no list of numbers"):
            runner.parse_range_list(wrong)


def _engine(**config: Any) -> Any:
    batch = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 2), config=batch | config)
    return engine


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_members_that_clients_read(stage: int) -> None:
    engine = _engine(zero_optimization={"stage": stage}, fp16={"enabled": True, "initial_scale_power": 4})
    optimizer = engine.optimizer
    assert optimizer.loss_scaler.loss_scale == optimizer.loss_scaler.cur_scale == 16.0
    assert optimizer.dynamic_loss_scale is True
    assert optimizer.needs_scaler() is True
    assert (engine.managed_gradient_accumulation, engine.pipeline_parallelism) == (True, False)
    assert engine._is_gradient_accumulation_boundary is None
    engine.set_gradient_accumulation_boundary(False)
    assert engine._is_gradient_accumulation_boundary is False
    engine.destroy()
    engine = _engine(zero_optimization={"stage": stage})
    assert engine.optimizer.needs_scaler() is False
    assert engine.basic_optimizer.adam_w_mode is True
    engine.destroy()


def test_a_loss_of_two_engines_goes_through_the_scale_of_each() -> None:
    """With different scales each engine's own backward part is scaled by its own: the shared loss is cut between."""
    engines = [_engine(fp16={"enabled": True, "initial_scale_power": power}) for power in (3, 3)]
    x = torch.ones(2, 4)
    loss = sum(engine(x.half()).float().sum() for engine in engines)
    engines[1].scale(engines[0].scale(loss) / engines[0].loss_scale()).backward()
    for engine in engines:
        engine.step()
        assert engine.was_step_applied()
        assert float(engine.get_global_grad_norm()) == pytest.approx(float(torch.tensor([8 * 4.0 + 2 * 4.0]).sqrt()))
        engine.destroy()


@pytest.mark.parametrize("given", ["nothing", "an iterator", "groups"])
def test_an_optimizer_by_a_function_gets_the_trained_parameters(given: str) -> None:
    """As a list, or as the groups it was given, without those that have nothing to train."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    frozen, trained = (list(layer.parameters()) for layer in model)
    groups = [{"params": frozen, "lr": 1.0}, {"params": [*frozen, *trained], "lr": 0.5}]
    parameters = {"nothing": None, "an iterator": iter([*frozen, *trained]), "groups": groups}[given]

    def make(params: Any) -> torch.optim.Optimizer:
        assert isinstance(params, list)
        if given == "groups":
            assert [group["lr"] for group in params] == [0.5]
            params = params[0]["params"]
        assert [id(p) for p in params] == [id(p) for p in trained]
        return torch.optim.Adam(params)

    config = {"train_batch_size": 1}
    engine, *_ = deepspeed.initialize(model=model, optimizer=make, model_parameters=parameters, config=config)
    assert isinstance(engine.basic_optimizer, torch.optim.Adam)
    engine.destroy()


def test_a_class_of_optimizers_and_one_of_schedules_are_called() -> None:
    class Schedule:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.steps = optimizer, 0

        def step(self) -> None:
            self.steps += 1

    for schedule in (Schedule, lambda optimizer: Schedule(optimizer)):
        engine, _, _, made = deepspeed.initialize(
            model=nn.Linear(2, 2), optimizer=torch.optim.Adagrad, lr_scheduler=schedule, config={"train_batch_size": 1}
        )
        assert type(made) is Schedule and made is engine.lr_scheduler and made.optimizer is engine.basic_optimizer
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert made.steps == 1
        engine.destroy()
    made = Schedule(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    engine, *_, kept = deepspeed.initialize(
        model=nn.Linear(2, 2), optimizer=torch.optim.Adagrad, lr_scheduler=made, config={"train_batch_size": 1}
    )
    assert kept is made
    engine.destroy()


def test_the_blocks_of_monitors_make_a_monitor(tmp_path: Any) -> None:
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    config = deepspeed.DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": block})
    MonitorMaster(config.monitor_config).write_events([("Train/loss", 0.5, 3)])
    alone = csvMonitor(config.csv_monitor)
    alone.write_events([("Train/lr", 0.5, 3), ("Train/lr", 0.25, 4)])
    assert config.monitor_config.enabled and alone.enabled and alone.output_path == str(tmp_path)
    assert (tmp_path / "run/Train_loss.csv").read_text() == "step,loss\n3,0.5\n"
    assert (tmp_path / "run/Train_lr.csv").read_text() == "step,lr\n3,0.5\n4,0.25\n"
    assert config.monitor_config.model_dump()["csv_monitor"]["job_name"] == "run"
    assert config.flops_profiler_config.model_dump()["profile_step"] == 1
    assert not deepspeed.DeepSpeedConfig({"train_batch_size": 1}).monitor_config.enabled


@pytest.mark.parametrize(
    ("module", "name", "block", "keys"),
    [
        ("csv_monitor", "csvMonitor", "csv_monitor", {"output_path": "logs", "job_name": "mine"}),
        ("tensorboard", "TensorBoardMonitor", "tensorboard", {"output_path": "logs", "job_name": "mine"}),
        ("wandb", "WandbMonitor", "wandb", {"group": "g", "team": "t", "project": "p"}),
        ("comet", "CometMonitor", "comet", {"workspace": "w", "project": "p"}),
    ],
)
def test_each_monitor_is_made_of_its_own_block(module: str, name: str, block: str, keys: dict[str, str]) -> None:
    """Whose keys it has as attributes; switched off it needs no package and writes nothing."""
    kind = getattr(importlib.import_module(f"deepspeed.monitor.{module}"), name)
    defaults = getattr(DeepSpeedMonitorConfig(), block)
    for given in ({}, keys):
        config = deepspeed.DeepSpeedConfig({"train_batch_size": 1, block: {"enabled": False} | given})
        monitor = kind(getattr(config.monitor_config, block))
        assert not monitor.enabled and isinstance(monitor, MonitorMaster)
        assert all(getattr(monitor, key) == given.get(key, getattr(defaults, key)) for key in keys)
        monitor.write_events([("Train/loss", 0.5, 3)])


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_the_user_began_goes_on_after_the_engine(monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    run = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(run=run if begun else None, init=mock.Mock(return_value=run)))
    monitor = MonitorMaster(deepspeed.DeepSpeedConfig({"train_batch_size": 1, "wandb": {"enabled": True}}))
    monitor.write_events([("Train/loss", 0.5, 3)])
    monitor.close()
    assert run.log.called and run.finish.called is not begun


@pytest.mark.parametrize("begun", [False, True])
def test_an_experiment_that_the_user_began_goes_on_and_hears_of_a_rollback(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    experiment = mock.Mock()
    running = mock.Mock(return_value=experiment if begun else None)
    comet = mock.Mock(start=mock.Mock(return_value=experiment), get_running_experiment=running)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    block = {"enabled": True, "samples_log_interval": 2}
    monitor = MonitorMaster(deepspeed.DeepSpeedConfig({"train_batch_size": 1, "comet": block}))
    for step in (100, 101, 10, 12):
        monitor.write_events([("Train/loss", 0.5, step)])
    monitor.close()
    assert [call.kwargs["step"] for call in experiment.log_metric.call_args_list] == [100, 10, 12]
    assert experiment.end.called is not begun


def test_the_log_of_collectives_can_be_started_stopped_and_asked() -> None:
    log = CommsLogger()
    assert log.get_operation_summary("all_reduce") == {}
    log.start_profiling_comms()
    assert log.enabled and log.wants("all_reduce", prof=False)
    for latency in (1.0, 3.0):
        log.record("all_reduce", 1024, latency, ranks=2)
    row = log.get_operation_summary("all_reduce")[1024]
    assert (row["count"], row["total_latency_ms"], row["avg_latency_ms"]) == (2, 4.0, 2.0)
    log.stop_profiling_comms()
    assert not log.wants("all_reduce", prof=False) and log.count() == 2


def test_deepspeed_comm_writes_to_a_log_that_clients_hold() -> None:
    engine = _engine()
    log = deepspeed.comm.comms_logger
    assert isinstance(log, CommsLogger)
    log.start_profiling_comms()
    try:
        deepspeed.comm.all_reduce(torch.ones(256))
        log.stop_profiling_comms()
        deepspeed.comm.all_reduce(torch.ones(256))
        summary = log.get_operation_summary("all_reduce")
        assert summary[1024]["count"] == 1
        assert summary == deepspeed.comm.log_summary(return_dict=True)["summary"]["all_reduce"]
    finally:
        deepspeed.comm.configure(enabled=False, prof_all=True)
        deepspeed.comm.reset_log()
        engine.destroy()


def test_the_dtype_between_ranks_can_be_asked_and_is_settled() -> None:
    engine = _engine(bf16={"enabled": True}, communication_data_type="fp32")
    assert engine.communication_data_type is torch.float32
    engine.communication_data_type = torch.float32
    with pytest.raises(RuntimeError, match="set it in the configuration"):
        engine.communication_data_type = torch.bfloat16
    engine.destroy()
    engine = _engine(bf16={"enabled": True})
    assert engine.communication_data_type is torch.bfloat16
    engine.destroy()


def test_a_folder_without_a_name_is_refused_as_clients_expect() -> None:
    engine = _engine()
    saves = ("save_checkpoint", "save_16bit_model", "save_pretrained")
    for folder in ("", None, 7, b"x", ["x"]):
        for call in (*saves, *(["load_checkpoint"] if folder != "" else [])):
            with pytest.raises(AssertionError, match=f"{call} needs a folder") as error:
                getattr(engine, call)(folder)
            assert isinstance(error.value, ValueError) and repr(folder) in str(error.value)
    engine.destroy()


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.5)
    schedule = WarmupLR(torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=rate), 0.0, 0.1, 10, "linear")
    for step in range(3):
        schedule.step()
        assert schedule.optimizer.param_groups[0]["lr"] is rate
        assert float(rate) == pytest.approx(0.01 * step)


def test_the_kind_of_warmup_can_be_read() -> None:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    found = [WarmupLR(optimizer, warmup_type=given).warmup_type for given in ("log", "linear", "cubic")]
    assert found == ["log", "linear", "log"]


def test_tensors_by_kind() -> None:
    accelerator = get_accelerator()
    for name, dtype in {"Byte": torch.uint8, "Long": torch.int64, "Half": torch.half, "Float": torch.float}.items():
        make = getattr(accelerator, f"{name}Tensor")
        assert (make([1, 0]).tolist(), make([1]).dtype, make(2, 3).shape) == ([1, 0], dtype, (2, 3))
    assert accelerator.BFloat16Tensor(2).dtype is torch.bfloat16


def test_experts_have_optimizer_groups_of_their_own() -> None:
    group = {"params": [*nn.Linear(2, 2).parameters()], "name": "all"}
    assert split_groups(group) == [group]
    assert split_groups([group, group]) == [group, group]
    weight, bias = group["params"]
    weight.allreduce, weight.group_name = False, "ep_size_2"
    assert split_groups(group) == [
        {"params": [bias], "name": "all"},
        {"params": [weight], "name": "ep_size_2", "moe": True},
    ]
    bias.allreduce, bias.group_name = False, "ep_size_2"
    assert [len(g["params"]) for g in split_groups(group, max_group_size=5)] == [0, 1, 1]


@pytest.mark.parametrize("norm_type", [2, 1, float("inf")])
def test_gradients_are_clipped_as_by_torch(norm_type: float) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model(torch.ones(2, 4)).sum().backward()
    norm = clip_grad_norm_(models[0].parameters(), 0.1, norm_type)
    assert torch.allclose(norm, nn.utils.clip_grad_norm_(models[1].parameters(), 0.1, norm_type))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad)
    assert float(clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0)) == 0.0
    assert get_global_norm([3.0, 4.0]) == 5.0 and prefix_sum_inc([1, 2, 3]) == [1, 3, 6]


def test_a_block_that_a_program_builds_takes_old_spellings_and_needs_no_stage() -> None:
    assert DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer.device == "cpu"
    assert DeepSpeedZeroConfig(cpu_offload_param=True).offload_param.device == "cpu"
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save
    zero = DeepSpeedZeroConfig(offload_optimizer={"device": "cpu", "pipeline_read": True})
    assert (zero.stage, zero.overlap_comm, zero.offload_optimizer.pipeline) == (0, False, True)
    assert DeepSpeedZeroConfig(offload_optimizer={"device": "cpu"}).offload_optimizer.pipeline is False
    assert deepspeed.runtime.zero.utils.__name__ == "deepspeed.runtime.zero.utils"


def test_leaf_modules_are_lists_as_the_client_wrote_them() -> None:
    leaf = DeepSpeedZeroConfig(stage=3, leaf_module={"names": ["b", "a", "b"], "name_suffixes": "c"}).leaf_module
    assert (leaf.names, leaf.name_suffixes) == (["b", "a"], ["c"])
    assert isinstance(leaf.classes, list)
    assert leaf.classes[0] == "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock"
    leaf.classes.append("another")
    assert "another" not in DeepSpeedZeroConfig().leaf_module.classes
