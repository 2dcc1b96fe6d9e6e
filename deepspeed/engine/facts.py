"""The engine's answers to questions of clients about its configuration and its place among the ranks."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.attrs import answers
from deepspeed.comm.group_getters import GETTERS
from deepspeed.device import DTYPES
from deepspeed.errors import UsageError, pending_function, raise_not_yet


class EngineFacts:
    """Mixin: one reader of each fact, by the names that clients know.

    ``_config``, ``mesh`` and the like come from the engine; one reader of each ``zero_*`` key from its ``__getattr__``.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    # -- configuration and place ----------------------------------------------------------------------------------
    config = property(attrgetter("_config.source"))  # the very dict the caller passed (or the parsed file)
    global_rank = property(lambda self: self.mesh.job.ranks[self.mesh.job.index])
    world_size = property(attrgetter("mesh.job.size"))
    dp_world_size = property(attrgetter("mesh.data.size"))
    mp_world_size = property(attrgetter("mesh.tp.size"))
    data_parallel_group = seq_data_parallel_group = property(attrgetter("mesh.data.pg"))

    managed_gradient_accumulation = property(attrgetter("_managed"))
    pipeline_parallelism = False
    mpu: Any = None  # the client's; in a pipeline the grid
    _is_gradient_accumulation_boundary = property(attrgetter("_forced_boundary"))  # None: nobody has forced it

    train_micro_batch_size_per_gpu = answers("_micro")
    gradient_accumulation_steps = answers("_gas")
    zero_optimization_stage = answers("_config.zero_stage")  # client-facing name
    fp16_auto_cast = answers("_config.fp16.auto_cast")
    torch_autocast_enabled = answers("_config.torch_autocast.enabled")
    gradient_clipping = answers("_config.gradient_clipping")
    steps_per_print = answers("_config.steps_per_print")
    wall_clock_breakdown = answers("_config.wall_clock_breakdown")
    memory_breakdown = answers("_config.memory_breakdown")
    dump_state = answers("_config.dump_state")
    log_level = answers("_config.log_level")
    autotp_size = answers("_config.tensor_parallel.autotp_size")
    was_step_applied = answers(lambda self: self._updated and not self.overflowed)

    def gradient_divisor(self, *, together: bool) -> float:
        """What the mean of gradients at rest has still to be divided by: the loss scale and, which takes all ranks
        ``together``, the weight of the tokens of the window so far.
        """
        tokens = self._tokens.mean(self.mesh.job) if together and self._tokens is not None else 0.0
        return float(self.current_loss_scale()) * (tokens if tokens > 0 else 1.0)

    loss_scale = current_loss_scale = answers("_scaler.loss_scale")
    dynamic_loss_scale = answers("_scaler.dynamic")
    get_data_parallel_rank = answers("mesh.data.index")
    get_wall_clock_timers = answers("timers")  # harmless stand-ins unless ``wall_clock_breakdown`` is on
    memory_plan = answers("_parts.memory")  # what a rank's states hold per tier, as computed before they were built
    # of the last update before clipping, unscaled; inf after a skipped one
    get_global_grad_norm = answers(lambda self: self._hear()._result.norm)
    places = property(attrgetter("_parts.tiers.describe"))  # where offloaded states rest, in words
    attached = property(attrgetter("runtime.attached"))  # a context with optimizer state that rests on a drive
    loss_scaler = property(attrgetter("_scaler"))
    scaler_state = property(attrgetter("_scaler.state_dict"))
    load_scaler_state = property(attrgetter("_scaler.load_state_dict"))
    train_batch_size = answers(lambda self: self._micro * self._gas * self.mesh.data.size)
    get_batch_info = answers(
        attrgetter("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    zero_optimization = answers(lambda self: self._config.zero_stage > 0)
    zero_optimization_partition_gradients = answers(lambda self: self._config.zero_stage >= 2)
    zero_optimization_partition_weights = answers(lambda self: self._config.zero_stage >= 3)
    zero_cpu_offload = answers(lambda self: self._config.zero.offload_optimizer is not None)
    fp16_enabled = answers(lambda self: self._config.compute_dtype == "fp16")
    bfloat16_enabled = answers(lambda self: self._config.compute_dtype == "bf16")
    torch_autocast_dtype = answers(lambda self: DTYPES[self._config.torch_autocast.dtype])
    model_dtype = answers(lambda self: DTYPES[self._config.compute_dtype])
    accumulation_dtype = answers(lambda self: DTYPES[self._config.grad_accum_dtype or "fp32"])
    get_data_types = answers(lambda self: (self.model_dtype(), self.accumulation_dtype()))
    optimizer_params = answers(lambda self: getattr(self._config.optimizer, "params", None))
    scheduler_name = answers(lambda self: getattr(self._config.scheduler, "type", None))
    scheduler_params = answers(lambda self: getattr(self._config.scheduler, "params", None))
    get_model_parallel_rank = get_tensor_parallel_rank = answers("mesh.tp.index")
    seq_parallel_group = property(  # None where each rank has whole sequences
        lambda self: (
            GETTERS["get_sequence_parallel_group"]() if GETTERS["get_sequence_parallel_world_size"]() > 1 else None
        )
    )
    get_sequence_parallel_group = answers("seq_parallel_group")
    _groups = answers(lambda self: self.basic_optimizer.param_groups if self.basic_optimizer is not None else [])
    get_lr = answers(lambda self: [group["lr"] for group in self._hear()._groups()])
    get_type = answers(lambda self: [group.get("type") for group in self._groups()])
    get_mom = answers(lambda self: [group.get("betas", group.get("momentum")) for group in self._hear()._groups()])

    def optimizer_name(self) -> str | None:
        if self._config.optimizer is not None:
            return self._config.optimizer.type
        return type(self.basic_optimizer).__name__ if self.basic_optimizer is not None else None

    # of features that are not in this release
    set_data_post_process_func = pending_function(
        "engine.set_data_post_process_func", "Process samples in the dataset, or in its collate_fn."
    )
    set_custom_curriculum_learning_schedule = pending_function(
        "engine.set_custom_curriculum_learning_schedule", "A data_sampler of your own decides which samples come when."
    )
    register_compile_pass = pending_function(
        "engine.register_compile_pass", "engine.compile(backend=...) takes every backend of torch.compile."
    )
    get_compile_time = pending_function("engine.get_compile_time", "torch._dynamo.utils.compile_times() has them.")

    @property
    def communication_data_type(self) -> torch.dtype:
        """Dtype of gradients between ranks."""
        return DTYPES[self._config.communication_data_type or self._config.compute_dtype]

    @communication_data_type.setter
    def communication_data_type(self, value: torch.dtype) -> None:
        """Raises UsageError where it is another one."""
        if value != self.communication_data_type:
            raise UsageError(
                f"communication_data_type is {self.communication_data_type}, and buffers are made for it: set it in "
                "the configuration, before deepspeed.initialize"
            )

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Of engines of a PipelineModule, see deepspeed.pipe; NotYetError for others."""
        raise_not_yet("engine.train_batch of a model that is no PipelineModule")

    def eval_batch(self, data_iter: Any, *_: Any, **__: Any) -> Any:
        """Of engines of a PipelineModule, see deepspeed.pipe; NotYetError for others."""
        raise_not_yet("engine.eval_batch of a model that is no PipelineModule")
