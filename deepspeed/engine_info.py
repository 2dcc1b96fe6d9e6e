"""What an engine answers about its configuration and place: accessors only, one line each."""

from typing import TYPE_CHECKING, Any

import torch

from deepspeed.config import DeepSpeedConfig

if TYPE_CHECKING:
    from deepspeed.mesh.groups import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class EngineInfo:
    """Mixin with the read-only part of the client interface. ``_config`` and ``mesh`` come from the engine."""

    _config: DeepSpeedConfig
    mesh: "Mesh"
    basic_optimizer: torch.optim.Optimizer | None
    _gas: int
    _micro: int

    @property
    def config(self) -> dict[str, Any]:
        """The very dict the caller passed (or the parsed file)."""
        return self._config.source

    def train_batch_size(self) -> int:
        return self._micro * self._gas * self.mesh.data.size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro

    def gradient_accumulation_steps(self) -> int:
        return self._gas

    def get_batch_info(self) -> tuple[Any, Any, Any]:
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    def zero_optimization(self) -> bool:
        return self._config.zero_stage > 0

    def zero_optimization_stage(self) -> int:  # client-facing name
        return self._config.zero_stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self._config.zero_stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self._config.zero_stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self._config.zero.gather_16bit_weights_on_model_save

    def zero_offload_optimizer(self) -> Any:
        return self._config.zero.offload_optimizer

    def zero_offload_param(self) -> Any:
        return self._config.zero.offload_param

    def zero_cpu_offload(self) -> bool:
        return self._config.zero.offload_optimizer is not None

    def fp16_enabled(self) -> bool:
        return self._config.compute_dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._config.compute_dtype == "bf16"

    def fp16_auto_cast(self) -> bool:
        return self._config.fp16.auto_cast

    def torch_autocast_enabled(self) -> bool:
        return self._config.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype:
        return DTYPES[self._config.torch_autocast.dtype]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(model dtype, gradient accumulation dtype)."""
        return DTYPES[self._config.compute_dtype], self.accumulation_dtype()

    def accumulation_dtype(self) -> torch.dtype:
        """Gradients accumulate in fp32 unless the configuration says otherwise."""
        return DTYPES[self._config.grad_accum_dtype or "fp32"]

    def gradient_clipping(self) -> float:
        return self._config.gradient_clipping

    def steps_per_print(self) -> Any:
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self._config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        return self._config.memory_breakdown

    def dump_state(self) -> bool:
        return self._config.dump_state

    def optimizer_name(self) -> str | None:
        if self._config.optimizer is not None:
            return self._config.optimizer.type
        return type(self.basic_optimizer).__name__ if self.basic_optimizer is not None else None

    def optimizer_params(self) -> dict[str, Any] | None:
        return self._config.optimizer.params if self._config.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        return self._config.scheduler.type if self._config.scheduler is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        return self._config.scheduler.params if self._config.scheduler is not None else None

    def get_data_parallel_rank(self) -> int:
        return self.mesh.data.index

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_parallel_rank(self) -> int:
        return 0

    def get_sequence_parallel_group(self) -> None:
        return None

    @property
    def dp_world_size(self) -> int:
        return self.mesh.data.size

    @property
    def mp_world_size(self) -> int:
        return 1

    @property
    def data_parallel_group(self) -> Any:
        return self.mesh.data.pg

    seq_data_parallel_group = data_parallel_group

    def get_lr(self) -> list[float]:
        return [g["lr"] for g in self.basic_optimizer.param_groups] if self.basic_optimizer is not None else []

    def get_mom(self) -> list[Any]:
        """Per group: momentum for SGD and RMSprop, betas otherwise."""
        groups = self.basic_optimizer.param_groups if self.basic_optimizer is not None else []
        return [g["momentum"] if "momentum" in g and "betas" not in g else g.get("betas") for g in groups]

    def get_type(self) -> list[Any]:
        return [g.get("type") for g in self.basic_optimizer.param_groups] if self.basic_optimizer is not None else []
