"""The engine's answers to questions of clients about its configuration and its place among the ranks."""

import gc
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, SequentialSampler

from deepspeed.accelerator.device import DTYPES
from deepspeed.client.attrs import answers, attribute_of
from deepspeed.client.data_loader import DeepSpeedDataLoader
from deepspeed.errors import UsageError, pending_function, raise_not_yet
from deepspeed.moe.state import load_moe_state_dict


class EngineFacts:
    """Mixin with one getter of each fact, by the names that clients know.

    ``_config``, ``mesh`` and the like come from the engine; one getter of each ``zero_*`` key from its ``__getattr__``.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    config = property(attrgetter("_config.source"), doc="The dict that was given, or what the file holds.")
    global_rank = property(lambda self: self.mesh.job.ranks[self.mesh.job.index], doc="This rank of the job.")
    world_size = property(attrgetter("mesh.job.size"), doc="Ranks of the job.")
    dp_world_size = property(attrgetter("mesh.data.size"), doc="Data-parallel ranks.")
    mp_world_size = property(attrgetter("mesh.tp.size"), doc="Tensor-parallel ranks.")
    data_parallel_group = seq_data_parallel_group = property(attrgetter("mesh.data.pg"), doc="A process group.")
    seq_parallel_group = property(attrgetter("mesh.sp.pg"), doc="The group of ranks that share a sequence, or None.")

    managed_gradient_accumulation = property(attrgetter("_managed"), doc="Whether the engine counts micro-batches.")
    pipeline_parallelism = False
    mpu: Any = None  # the client's; in a pipeline the grid
    collate_fn: Callable[[list[Any]], Any] | None = None
    _is_gradient_accumulation_boundary = property(attrgetter("_forced_boundary"))  # None: nobody has forced it

    train_micro_batch_size_per_gpu = answers("_micro", "Samples of a micro-batch on one rank.")
    gradient_accumulation_steps = answers("_gas", "Micro-batches of one update.")
    zero_optimization_stage = answers("_config.zero_stage", "The ZeRO stage, 0 to 3.")  # client-facing name
    fp16_auto_cast = answers("_config.fp16.auto_cast", "Whether inputs become fp16.")
    torch_autocast_enabled = answers("_config.torch_autocast.enabled", "Whether forwards run under torch's autocast.")
    gradient_clipping = answers("_config.gradient_clipping", "Largest L2 norm of all gradients; 0: no limit.")
    steps_per_print = answers("_config.steps_per_print", "Updates from one line of the log to the next; None: none.")
    wall_clock_breakdown = answers("_config.wall_clock_breakdown", "Whether phases are timed.")
    memory_breakdown = answers("_config.memory_breakdown", "Whether memory is logged after each phase.")
    dump_state = answers("_config.dump_state", "Whether the whole configuration is logged at the start.")
    log_level = answers("_config.log_level", "The key ``log_level``.")
    autotp_size = answers("_config.tensor_parallel.autotp_size", "Ranks that share each layer, by the configuration.")
    skipped_steps = attribute_of(lambda self: self._outcomes.hear(), "skipped", "Updates that were left out so far.")
    overflowed = attribute_of(lambda self: self._outcomes.hear(), "overflowed", "Whether the last update was left out.")
    was_step_applied = answers(lambda self: self._updated and not self.overflowed, "Whether the last step() updated.")

    def _gradient_divisor(self, *, together: bool) -> float:
        """Return the divisor that the mean of gradients at rest still needs: the loss scale and, which takes all ranks
        ``together``, the weight of the tokens of the window so far.
        """
        tokens = self._tokens.mean(self.mesh.job) if together and self._tokens is not None else 0.0
        return float(self.current_loss_scale()) * (tokens if tokens > 0 else 1.0)

    loss_scale = current_loss_scale = answers("_scaler.loss_scale", "What losses are multiplied by; 1 without fp16.")
    dynamic_loss_scale = answers("_scaler.dynamic", "Whether the loss scale adapts to overflows.")
    get_data_parallel_rank = answers("mesh.data.index", "This rank among the data-parallel ones.")
    get_wall_clock_timers = answers("timers", "Timers by name, in ms; stand-ins unless ``wall_clock_breakdown`` is on.")
    collect_python_gc = answers(lambda self: gc.collect(), "Collect cyclic garbage now; return the number of objects.")
    memory_plan = answers("_parts.memory", "What a rank's states hold per tier, in bytes, as computed beforehand.")
    get_global_grad_norm = answers(
        lambda self: self._outcomes.hear().last.norm,
        "L2 norm of all gradients of the last update, before clipping and without loss scale; inf: skipped.",
    )
    places = answers(lambda self: self._parts.tiers.describe(), "Where offloaded states rest, in words.")
    train_batch_size = answers(
        lambda self: self._micro * self._gas * self.mesh.data.size, "Samples of one update, of all ranks."
    )
    get_batch_info = answers(
        attrgetter("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        "train_batch_size(), train_micro_batch_size_per_gpu(), gradient_accumulation_steps().",
    )
    zero_optimization = answers(lambda self: self._config.zero_stage > 0, "Whether anything is sharded.")
    zero_optimization_partition_gradients = answers(
        lambda self: self._config.zero_stage >= 2, "Whether gradients are sharded."
    )
    zero_optimization_partition_weights = answers(
        lambda self: self._config.zero_stage >= 3, "Whether parameters are sharded."
    )
    zero_cpu_offload = answers(
        lambda self: self._config.zero.offload_optimizer is not None, "Whether optimizer states leave the device."
    )
    fp16_enabled = answers(lambda self: self._config.compute_dtype == "fp16", "Whether the model computes in fp16.")
    bfloat16_enabled = answers(lambda self: self._config.compute_dtype == "bf16", "Whether the model computes in bf16.")
    torch_autocast_dtype = answers(
        lambda self: DTYPES[self._config.torch_autocast.dtype], "The torch.dtype of autocast."
    )
    model_dtype = answers(lambda self: DTYPES[self._config.compute_dtype], "The torch.dtype of parameters.")
    accumulation_dtype = answers(
        lambda self: DTYPES[self._config.dtype_policy.accumulation], "The torch.dtype of gradient sums."
    )
    get_data_types = answers(
        lambda self: (self.model_dtype(), self.accumulation_dtype()), "model_dtype(), accumulation_dtype()."
    )
    optimizer_params = answers(lambda self: getattr(self._config.optimizer, "params", None), "As configured, or None.")
    scheduler_name = answers(lambda self: getattr(self._config.scheduler, "type", None), "As configured, or None.")
    scheduler_params = answers(lambda self: getattr(self._config.scheduler, "params", None), "As configured, or None.")
    get_model_parallel_rank = get_tensor_parallel_rank = answers(
        "mesh.tp.index", "This rank among the tensor-parallel ones."
    )

    get_sequence_parallel_group = answers("seq_parallel_group", "``seq_parallel_group``.")
    _groups = answers(lambda self: self.basic_optimizer.param_groups if self.basic_optimizer is not None else [])
    get_lr = answers(lambda self: [group["lr"] for group in self._heard_groups()], "Learning rate of each group.")
    get_type = answers(lambda self: [group.get("type") for group in self._groups()], "The key ``type`` of each group.")
    get_mom = answers(
        lambda self: [group.get("betas", group.get("momentum")) for group in self._heard_groups()],
        "Betas, or the momentum, of each group.",
    )

    def optimizer_name(self) -> str | None:
        """Return the configured name, else the class of the client's optimizer; None without an optimizer."""
        if self._config.optimizer is not None:
            return self._config.optimizer.type
        return type(self.basic_optimizer).__name__ if self.basic_optimizer is not None else None

    load_moe_state_dict = staticmethod(load_moe_state_dict)
    _expert_loads: Any = None  # where they are counted

    def expert_loads(self) -> dict[str, Any]:
        """Return the loads of each layer's experts in the last window, over all ranks, by the layer's path: ``experts``
        and ``ranks`` (choices of each), ``dropped``, ``skew``, ``rank_skew``. UsageError where they are not counted.
        """
        if self._expert_loads is None:
            raise UsageError(
                "expert_loads(): loads are not counted. They are for a model with experts over ranks, with a monitor "
                "(csv_monitor, tensorboard, ...) or expert_parallel.load_balance_coeff in the configuration"
            )
        loads: dict[str, Any] = self._expert_loads.read()
        return loads

    def _save_moe_checkpoint(self, *args: Any, **options: Any) -> bool:
        """Save as ``save_checkpoint``, whose files have the experts of all ranks."""
        return bool(self.save_checkpoint(*args, **options))

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

    def _heard_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups when the outcome of every update is known, and the schedule stands right."""
        self._outcomes.hear()
        return [*self._groups()]

    @property
    def communication_data_type(self) -> torch.dtype:
        """Return the dtype of gradients in collectives."""
        return DTYPES[self._config.communication_data_type or self._config.compute_dtype]

    @communication_data_type.setter
    def communication_data_type(self, value: torch.dtype) -> None:
        """Raise UsageError where ``value`` is another dtype."""
        if value != self.communication_data_type:
            raise UsageError(
                f"communication_data_type is {self.communication_data_type}, and buffers are made for it: set it in "
                "the configuration, before deepspeed.initialize"
            )

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return a loader over ``dataset`` for this rank, which checkpoints know.

        Args:
            dataset: Of torch, sized or iterable.
            batch_size: Samples of a batch on this rank (default: the micro-batch).
            route: "train", shuffled and in parts of each rank; "eval" and "predict": each rank has all, in order.
            data_sampler: As torch's; so are ``pin_memory`` and ``collate_fn`` (default: that of ``initialize``).
            num_local_io_workers: Worker processes (default: none).
        """
        if data_sampler is None and route in ("eval", "predict") and not isinstance(dataset, IterableDataset):
            data_sampler = SequentialSampler(dataset)
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self._micro,
            pin_memory=pin_memory and self.device.type != "cpu",
            local_rank=self.local_rank,
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=self.mesh.data.size,
            data_parallel_rank=self.mesh.data.index,
            dataloader_drop_last=self._config.dataloader_drop_last,
        )

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Raise NotYetError; engines of a PipelineModule override it, see deepspeed.pipe."""
        raise_not_yet("engine.train_batch of a model that is no PipelineModule")

    def eval_batch(self, data_iter: Any, *_: Any, **__: Any) -> Any:
        """Raise NotYetError; engines of a PipelineModule override it, see deepspeed.pipe."""
        raise_not_yet("engine.eval_batch of a model that is no PipelineModule")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an engine cannot be pickled or copied: engine.save_checkpoint() keeps all of it, "
            "engine.save_16bit_model() its weights, and torch.save(engine.module) its module where parameters are whole"
        )
