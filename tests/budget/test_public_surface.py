"""Names that clients use exist, and importing the package costs and does next to nothing."""

import importlib
import inspect
import json
import operator
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import deepspeed
from tests.harness.rows import for_each


def _words(text: str) -> list[str]:
    return text.split()


# public_api.md section 1, as far as this release promises it (some raise NotYetError when used)
TOP_LEVEL = _words("""
initialize init_distributed add_config_arguments DeepSpeedEngine DeepSpeedConfig DeepSpeedConfigError DeepSpeedOptimizer
DeepSpeedDataLoader OnDevice log_dist logger get_accelerator dist zero checkpointing pipe moe ops utils comm runtime
accelerator module_inject checkpoint init_inference tp_model_init load_ds_config PipelineModule PipelineEngine
DualPipeVModule DualPipeVEngine
__version__ __version_major__
__version_minor__ __version_patch__ __git_hash__ __git_branch__ version git_version_info
""")

# reached by attribute after a bare ``import deepspeed``
ATTRIBUTE_PATHS = _words("""
zero.Init zero.GatheredParameters zero.register_external_parameter comm.get_rank utils.logging.logger utils.groups
checkpointing.configure checkpointing.checkpoint runtime.lr_schedules.VALID_LR_SCHEDULES runtime.utils.see_memory_usage
runtime.engine.DeepSpeedEngine ops.adam.FusedAdam pipe.PipelineModule accelerator.get_accelerator
module_inject.layers.GatherReplacedLayerParams
""")

# client_surface.md appendix A: "module: names"
MODULES = """
deepspeed.accelerator: get_accelerator
deepspeed.accelerator.real_accelerator: get_accelerator set_accelerator
deepspeed.checkpoint.utils: clone_tensors_for_torch_save
deepspeed.comm: all_gather all_gather_into_tensor all_reduce all_to_all_single allgather_fn barrier broadcast
deepspeed.comm: destroy_process_group
deepspeed.comm: get_local_rank get_rank get_world_size has_all_gather_into_tensor init_distributed irecv
deepspeed.comm: is_initialized isend
deepspeed.comm: mpi_discovery new_group recv reduce_scatter_fn send log_summary configure ReduceOp P2POp
deepspeed.constants: CROSS_RANK CROSS_SIZE TORCH_DISTRIBUTED_DEFAULT_PORT
deepspeed.git_version_info: accelerator_name installed_ops torch_info
deepspeed.launcher.runner: DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE EXPORT_ENVS fetch_hostfile main
deepspeed.launcher.runner: parse_inclusion_exclusion
deepspeed.module_inject.layers: GatherReplacedLayerParams
deepspeed.moe.layer: MoE
deepspeed.monitor.monitor: MonitorMaster
deepspeed.moe.utils: split_params_into_different_moe_groups_for_optimizer
deepspeed.ops: __compatible_ops__
deepspeed.ops.adagrad: DeepSpeedCPUAdagrad
deepspeed.ops.adam: DeepSpeedCPUAdam FusedAdam
deepspeed.ops.aio: AsyncIOBuilder
deepspeed.ops.lamb: FusedLamb
deepspeed.ops.lion: DeepSpeedCPULion FusedLion
deepspeed.ops.op_builder: AsyncIOBuilder GDSBuilder
deepspeed.pipe: LayerSpec PipelineModule TiedLayerSpec
deepspeed.runtime.activation_checkpointing.checkpointing: _CUDA_RNG_STATE_TRACKER _set_cuda_rng_state checkpoint
deepspeed.runtime.activation_checkpointing.checkpointing: get_cuda_rng_tracker model_parallel_cuda_manual_seed
deepspeed.runtime.base_optimizer: DeepSpeedOptimizer ZeROOptimizer
deepspeed.runtime.bf16_optimizer: BF16_Optimizer
deepspeed.runtime.config: DeepSpeedConfig LAMB_OPTIMIZER ONEBIT_LAMB_OPTIMIZER
deepspeed.runtime.dataloader: DeepSpeedDataLoader RepeatingLoader
deepspeed.runtime.engine: DeepSpeedEngine
deepspeed.runtime.fp16.fused_optimizer: FP16_Optimizer
deepspeed.runtime.fp16.unfused_optimizer: FP16_UnfusedOptimizer
deepspeed.runtime.lr_schedules: VALID_LR_SCHEDULES LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR
deepspeed.runtime.pipe.engine: DeepSpeedEngine PipelineEngine PipelineError
deepspeed.runtime.pipe.module: LayerSpec PipelineModule TiedLayerSpec
deepspeed.runtime.pipe.topology: PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology
deepspeed.runtime.sequence_parallel.ulysses_sp: UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter
deepspeed.runtime.sequence_parallel.ulysses_sp: SequenceTiledCompute TiledFusedLogitsLoss TiledMLP
deepspeed.runtime.sequence_parallel.ulysses_sp: sequence_tiled_compute
deepspeed.runtime.activation_checkpointing.offload_activations: get_checkpoint_hidden_states_offloading_ctx_manager
deepspeed.runtime.utils: partition_balanced partition_uniform
deepspeed.runtime.utils: move_to_device see_memory_usage set_random_seed
deepspeed.runtime.zero: GatheredParameters Init register_external_parameter
deepspeed.runtime.zero.config: DeepSpeedZeroConfig
deepspeed.runtime.zero.offload_config: OffloadDeviceEnum OffloadStateTypeEnum
deepspeed.runtime.zero.parameter_offload: DeepSpeedZeRoOffload
deepspeed.runtime.zero.partition_parameters: GatheredParameters Init ZeroParamStatus ZeroParamType _orig_torch_arange
deepspeed.runtime.zero.partition_parameters: get_accelerator
deepspeed.runtime.zero.partition_parameters: register_external_parameter unregister_external_parameter
deepspeed.runtime.zero.partition_parameters: zero_wrapper_for_fp_tensor_constructor
deepspeed.runtime.zero.stage3: DeepSpeedZeroOptimizer_Stage3 estimate_zero3_model_states_mem_needs_all_live
deepspeed.runtime.zero.stage_1_and_2: DeepSpeedZeroOptimizer estimate_zero2_model_states_mem_needs_all_live
deepspeed.utils: OnDevice RepeatingLoader groups instrument_w_nvtx log_dist logger safe_get_full_fp32_param
deepspeed.utils: safe_get_full_grad
deepspeed.utils: safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad
deepspeed.utils: safe_get_local_optimizer_state
deepspeed.utils: safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param
deepspeed.utils: safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized set_z3_leaf_modules
deepspeed.utils: get_z3_leaf_modules unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter
deepspeed.utils.groups: _get_data_parallel_group _get_data_parallel_world_size _get_sequence_parallel_group
deepspeed.utils.groups: _get_model_parallel_rank _get_sequence_parallel_rank _get_sequence_parallel_world_size
deepspeed.utils.logging: log_dist logger print_dist
deepspeed.utils.timer: SynchronizedWallClockTimer
deepspeed.utils.zero_to_fp32: get_fp32_state_dict_from_zero_checkpoint get_model_state_file get_optim_files
""".strip().splitlines()

ENGINE = _words("""
forward backward step scale is_gradient_accumulation_boundary set_gradient_accumulation_boundary no_sync
allreduce_gradients
zero_grad train eval was_step_applied get_global_grad_norm get_lr get_mom get_type loss_scale dynamic_loss_scale
set_train_batch_size set_train_micro_batch_size train_batch_size train_micro_batch_size_per_gpu
gradient_accumulation_steps
zero_optimization zero_optimization_stage zero_optimization_partition_gradients zero_optimization_partition_weights
fp16_enabled bfloat16_enabled gradient_clipping optimizer_name scheduler_name steps_per_print get_data_types
get_batch_info
save_checkpoint load_checkpoint save_16bit_model module_state_dict empty_partition_cache deepspeed_io compile destroy
""")

IMPORT_PROBE = """
import json, sys
import torch
events = []
watched = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
watched += ("socket.connect", "socket.bind")
sys.addaudithook(lambda event, args: events.append(event) if event in watched else None)
before = set(sys.modules)
import deepspeed
for name in deepspeed.__all__:
    getattr(deepspeed, name)
new = sorted(set(sys.modules) - before)
started = [name for name in ("cuda", "xpu") if getattr(torch, name).is_initialized()]
group = torch.distributed.is_initialized()
sys.__stderr__.flush()
open(sys.argv[1], "w").write(json.dumps({"new": new, "events": events, "devices": started, "group": group}))
"""

HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.pipelining",
)
HEAVY += ("torch.distributed.elastic", "torch.distributed.run", "torch.utils.cpp_extension", "torch.utils.tensorboard")
HEAVY += ("matplotlib", "triton", "transformers", "tqdm", "pandas", "cpuinfo", "safetensors", "multiprocessing.pool")


@for_each("name", TOP_LEVEL)
def test_top_level_name(name: str) -> None:
    assert hasattr(deepspeed, name)


@for_each("path", ATTRIBUTE_PATHS)
def test_reached_by_attribute(path: str) -> None:
    probe = f"import deepspeed; deepspeed.{path}"
    value: object = deepspeed
    for part in path.split("."):
        value = getattr(value, part)
    assert value is not None, probe


@for_each("line", MODULES)
def test_module_names(line: str) -> None:
    module, _, names = line.partition(": ")
    loaded = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(loaded, name)] == []


@pytest.mark.parametrize(
    ("package", "carried"),
    [
        *(("comm", ""), ("dist", ""), ("config", ""), ("zero", ""), ("utils", "zero_to_fp32 groups logging timer")),
        *(("runtime.zero", "config partition_parameters utils"), ("ops.op_builder", "")),
    ],
)
def test_star_imports_bring_no_module_by_accident(package: str, carried: str) -> None:
    loaded = importlib.import_module(f"deepspeed.{package}")
    modules = [name for name in loaded.__all__ if isinstance(getattr(loaded, name), ModuleType)]
    assert modules == carried.split() and len(loaded.__all__) - len(modules) >= 8
    assert not [name for name in loaded.__all__ if name.startswith("_")]


def test_engine_methods() -> None:
    assert issubclass(deepspeed.DeepSpeedEngine, torch.nn.Module)
    assert [name for name in ENGINE if not callable(getattr(deepspeed.DeepSpeedEngine, name, None))] == []


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("accelerator.DeepSpeedAccelerator", "is_available current_device_name memory_stats"),
        ("ops.op_builder.OpBuilder", "absolute_name sources include_paths cxx_args nvcc_args extra_ldflags cpu_arch"),
    ],
)
def test_help_says_what_one_line_methods_answer(path: str, names: str) -> None:
    owner = operator.attrgetter(path)(deepspeed)
    for name in names.split():
        method = getattr(owner, name)
        assert inspect.getdoc(method) and next(iter(inspect.signature(method).parameters)) == "self", name


def test_the_same_object_under_every_path() -> None:
    assert deepspeed.runtime.engine.DeepSpeedEngine is deepspeed.DeepSpeedEngine
    assert deepspeed.comm.init_distributed is deepspeed.init_distributed
    assert deepspeed.accelerator.get_accelerator is deepspeed.get_accelerator
    assert deepspeed.runtime.zero.GatheredParameters is deepspeed.zero.GatheredParameters
    assert deepspeed.utils.logger is deepspeed.utils.logging.logger is deepspeed.logger
    assert deepspeed.dist is deepspeed.comm


def test_version_is_text_and_passes_the_gates() -> None:
    assert deepspeed.version == deepspeed.__version__
    assert deepspeed.version >= "0.18.9"  # clients compare as text


def test_initialize_signature() -> None:
    assert list(inspect.signature(deepspeed.initialize).parameters) == [
        *("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler", "distributed_port", "mpu"),
        *("dist_init_required", "collate_fn", "config", "mesh_param", "config_params"),
    ]


def test_init_signature() -> None:
    parameters = inspect.signature(deepspeed.zero.Init).parameters
    assert list(parameters)[:10] == [
        *(
            "module",
            "data_parallel_group",
            "mem_efficient_linear",
            "remote_device",
            "pin_memory",
            "config_dict_or_path",
        ),
        *("config", "enabled", "dtype", "mpu"),
    ]


def test_gathered_parameters_signature() -> None:
    parameters = inspect.signature(deepspeed.zero.GatheredParameters).parameters
    assert list(parameters)[:4] == ["params", "modifier_rank", "fwd_module", "enabled"]


@pytest.fixture(scope="module")
def import_effects(tmp_path_factory: pytest.TempPathFactory) -> dict:
    report = tmp_path_factory.mktemp("import") / "effects.json"
    done = subprocess.run([sys.executable, "-c", IMPORT_PROBE, str(report)], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return {**json.loads(report.read_text()), "stdout": done.stdout, "stderr": done.stderr}


def test_bare_import_loads_no_torch_and_is_quick() -> None:
    probe = (
        "import sys, time; start = time.process_time(); import deepspeed; print(time.process_time() - start, "
        "'torch' in sys.modules)"
    )
    seconds = []  # of the processor, the least of three: other programs may keep this one waiting
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=90)
        took, torch_loaded = done.stdout.split()
        seconds.append(float(took))
        assert torch_loaded == "False"
    assert min(seconds) < 0.3


def test_import_is_light(import_effects: dict) -> None:
    assert [
        name for name in import_effects["new"] if any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)
    ] == []


def test_import_is_silent_and_starts_nothing(import_effects: dict) -> None:
    assert (import_effects["stdout"], import_effects["stderr"]) == ("", "")
    assert import_effects["events"] == [] and import_effects["devices"] == [] and not import_effects["group"]
