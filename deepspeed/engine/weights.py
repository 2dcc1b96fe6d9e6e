"""The engine's whole weights: for a file, for an inference server, for generation; and states that leave the device."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.device import get_accelerator
from deepspeed.checkpoint.foreign.weights import original_parcels, torch_file, with_aliases, write_pretrained
from deepspeed.client.zero.gathered import GatheredParameters
from deepspeed.comm.collectives import failures
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.config.model.values import byte_count
from deepspeed.engine.checks import Checks
from deepspeed.errors import UsageError
from deepspeed.monitor.log import log_dist, log_dist_once, logger
from deepspeed.reallocate.adapters import is_adapter, merged_parcels
from deepspeed.reallocate.flow import Parcel, WeightFlow
from deepspeed.zero.module.state import leave_device, state_names
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.sync.failures import together
from deepspeed.zero.unit import UnitState

_BUCKET = "512MB"


class Weights:
    """Weights and other states of ``engine``, a DeepSpeedEngine, for callers that want them elsewhere."""

    def __init__(self, engine: Any) -> None:
        self.module: nn.Module = engine.module
        self.mesh: Mesh = engine.mesh
        self.runtime: Runtime = engine.runtime
        self.units_at_once = 1  # that ``unsharded`` asks for by one message
        self._checks: Checks = engine._checks
        self._config, self._parts = engine._config, engine._parts
        self._optimizer, self._device = engine.basic_optimizer, engine.device
        self._way_back: list[Callable[[], None]] = []  # of states that have left the device

    def stream_weights(
        self,
        max_bytes: int | str = _BUCKET,
        *,
        dst: int | None = None,
        merge_adapters: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> WeightFlow:
        """Stream whole weights and persistent buffers as buckets: lists of (name, tensor) on the device. Collective.

        The result is an iterator and a context manager; the engine stays as it is. If a rank leaves early, the ranks
        that go on raise UsageError with their next bucket. So they do after an error in another rank's loop, if that is
        inside a ``with``. Raises UsageError inside a forward or backward, ValueError for ``max_bytes``.

        Args:
            max_bytes: Limit of a bucket and its messages (a number, or "512MB"), unless one tensor is larger.
            dst: The one rank that gets the weights; the buckets of others are empty. None: all ranks.
            merge_adapters: Stream the model without adapters: PEFT merges these in, on copies, a layer at a time.
            exclude_frozen_parameters: Leave out what requires no gradient. Names are those of ``module.state_dict()``.
        """
        self._checks.alive(alone=False)
        self._checks.between_passes("stream_weights")
        try:
            limit = byte_count(max_bytes)
        except ValueError as error:
            raise ValueError(f"stream_weights: max_bytes {error}") from None
        if dst is not None and dst not in self.mesh.job.ranks:
            raise UsageError(f"stream_weights: dst {dst} is not one of the engine's ranks {list(self.mesh.job.ranks)}")
        if merge_adapters and self.mesh.pp.size > 1:
            raise UsageError("stream_weights(merge_adapters=True): a pipeline's stages have no PEFT model as a whole")
        tensors, aliases = state_names(self.module, exclude_frozen=exclude_frozen_parameters and not merge_adapters)
        parcels = merged_parcels(self.module, tensors, aliases) if merge_adapters else None
        target = None if dst is None else self.mesh.job.ranks.index(dst)
        return self._flow(tensors, limit, target=target, parcels=parcels)

    def settle(self, call: str) -> None:
        """Wait until the weights at rest are those of the last step and nobody writes them; on this rank alone.

        ``call`` names the caller. Raises UsageError inside a forward or backward, and where an update has failed.
        """
        self._checks.alive()
        self._checks.between_passes(call)
        self.runtime.update.wait()
        self.runtime.update.publish()

    def _flow(
        self, tensors: dict[str, torch.Tensor], limit: int, *, target: int | None, parcels: list[Parcel] | None = None
    ) -> WeightFlow:
        self._checks.alive(alone=False)
        self._checks.begin_collective()
        self.runtime.update.publish()
        flow = WeightFlow(self.mesh, tensors, max_bytes=limit, device=self._device, target=target, parcels=parcels)
        self._checks.open_flow = weakref.ref(flow)
        return flow

    def _to_first(self, tensors: dict[str, torch.Tensor], parcels: list[Parcel] | None = None) -> WeightFlow:
        """Send ``tensors``, whole, to the first rank."""
        return self._flow(tensors, byte_count(_BUCKET), target=0, parcels=parcels)

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        """Yield the module, its parameters gathered, without ZeRO's hooks, for generation. Collective at both ends.

        Inside, ranks may run different numbers of forwards (under tensor parallelism those that share a layer the same
        number). Edits are refused at the end, on all ranks. The log says once how much memory the weights take. Raises
        UsageError on all ranks where one lacks that memory, inside a forward or backward, and for pipelines.
        """
        self._checks.alive(alone=False)
        self._checks.between_passes("unsharded")
        if self.mesh.pp.size > 1:
            raise UsageError("unsharded(): each rank of a pipeline has its stage only; stream_weights() gives all")
        if self._checks.generating:  # the outer one has gathered, and gives the hooks back
            yield self.module
            return
        self._checks.begin_collective()
        self.runtime.update.publish()
        missing = [u for u in self.runtime.units if u.movable and u.state is UnitState.ABSENT]
        nbytes = sum(u.layout.numel * u.buffer.full.element_size() for u in missing)
        device = get_accelerator()
        kept = device.memory_reserved() - device.memory_allocated()  # by the allocator, for what comes
        free = device.available_memory() and device.available_memory() + max(0, kept)
        short = None
        if free and nbytes > free:
            short = UsageError(
                f"unsharded() needs {nbytes / 1e9:.2f} GB beside the shards and {free / 1e9:.2f} GB are free. Call "
                'engine.offload_states(["optim_states"]) first, generate through the engine (which gathers module by '
                "module), or send the weights to an inference server by engine.stream_weights()"
            )
        for rank, text in failures(short, self.mesh.talk).items():
            raise short or UsageError(f"{self.mesh.title(rank)}: {text}")
        if nbytes:
            log_dist_once(f"unsharded(): {nbytes / 1e9:.2f} GB of weights are whole on every rank inside the context")
        for start in range(0, len(missing), self.units_at_once):
            self.runtime.need(missing[start : start + self.units_at_once])
        with GatheredParameters(list(self.module.parameters()), layers_whole=False), self._parts.hooks.away():
            self._checks.generating = True
            try:
                yield self.module
            finally:
                self._checks.generating = False

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move states to host memory until ``reload_states``; states there or on a drive stay. Further calls add.

        Until then ``backward``, ``step`` and saves raise UsageError, and with parameters away forwards and generation.
        Raises UsageError inside a forward or backward, ValueError for another device.

        Args:
            include: Members of ``OffloadStateTypeEnum``; None: all. In fp32 ``hp_params`` are ``lp_params``.
            device: "cpu", or "none", which moves nothing.
            pin_memory: Page-lock the memory, for faster copies; ``non_blocking`` has no effect.
        """
        self._checks.alive(params=False)
        place = getattr(device, "value", device)
        if place == "none":
            logger.warning("offload_states(device='none') moves nothing")
            return
        if place != "cpu":
            raise ValueError(f"offload_states(device={place!r}): states can leave the device for 'cpu' only")
        self.runtime.update.wait()
        self.runtime.gradients.withdraw()
        self.runtime.gradients.land_all()
        self.runtime.before_update()  # what leaves the device may still be copied for a save
        units, arena = self.runtime.units, self._parts.tiers.arena
        self._checks.lent = True
        with contextlib.ExitStack() as undone:  # where host memory ends half way, all of them come back
            undone.callback(self.reload_states)
            params = leave_device(self._way_back, units, self._optimizer, include, arena=arena, pin=pin_memory)
            undone.pop_all()
        self._checks.params_lent |= params
        if self._device.type != "cpu":
            get_accelerator().empty_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring the states back that ``offload_states`` moved. After an error another call goes on with the rest."""
        while self._way_back:
            self._way_back[-1]()
            self._way_back.pop()
        self._checks.lent = self._checks.params_lent = False

    def empty_partition_cache(self) -> None:
        """Release every parameter that is gathered and not in use."""
        for unit in self.runtime.units:
            self.runtime.backward_done(unit)

    def save_pretrained(self, save_directory: Path | str, max_shard_size: int | str = "5GB", **options: Any) -> None:
        """Write ``model.safetensors``, in the module's dtype, and the files of its own ``save_pretrained``. Collective.

        Names are those that ``from_pretrained`` expects; of a PEFT model its adapters are written. The first rank
        holds a bucket at a time. Raises CheckpointError on every rank when a file cannot be written.

        Args:
            save_directory: The folder.
            max_shard_size: Bytes of a file (a number, or "5GB"); beyond it several files with an index.
            options: If there are any, the module's own method is called instead, on every rank.
        """
        saver = getattr(self.module, "save_pretrained", None)
        if saver is not None and options:
            saver(save_directory, max_shard_size=max_shard_size, **options)
            return
        self._checks.alive(alone=False)
        self._checks.between_passes("save_pretrained")
        tensors, aliases = state_names(self.module, exclude_frozen=False)
        folder = self._checks.folder(save_directory, "save_pretrained")
        with together(self.mesh, f"writing {folder}"):
            if hasattr(self.module, "peft_config"):
                wanted = {n: t for n, t in tensors.items() if t.requires_grad or is_adapter(n, self.module)}
                state = self._collected(wanted, aliases)
                if self.mesh.first and saver is not None:
                    saver(folder, state_dict=state)
                return
            parcels, outputs = original_parcels(self.module, tensors)
            with self._to_first(tensors, parcels) as flow:
                if self.mesh.first:
                    write_pretrained(saver, folder, flow, outputs, max_shard_size=max_shard_size)
                for _ in flow:
                    pass

    def save_16bit_model(
        self, save_dir: Path | str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write all weights in the compute dtype to ``save_dir/save_filename`` for ``torch.load``, a bucket at a time.

        Collective. Returns False, with nothing written, when parameters are sharded and
        ``stage3_gather_16bit_weights_on_model_save`` is off. Raises CheckpointError on every rank when the file
        cannot be written; an older one is intact then. ``exclude_frozen_parameters``: without what needs no gradient.
        """
        self._checks.alive(alone=False)
        if self.runtime.plan.regular.param.sharded and not self._config.zero.gather_16bit_weights_on_model_save:
            key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
            log_dist(f"save_16bit_model wrote nothing: set {key} to true", level=logging.WARNING)
            return False
        tensors, aliases = state_names(self.module, exclude_frozen=exclude_frozen_parameters)
        path = self._checks.folder(save_dir, "save_16bit_model") / save_filename
        with together(self.mesh, f"writing {path}"), self._to_first(tensors) as flow:
            if self.mesh.first:
                path.parent.mkdir(parents=True, exist_ok=True)
                shapes = {name: (entry.dtype, entry.shape) for name, entry in flow.entries.items()}
                with torch_file(path, shapes, aliases=aliases) as write:
                    for name, values in (pair for bucket in flow for pair in bucket):
                        write(name, values)
            for _ in flow:
                pass
        return True

    def _collected(self, tensors: dict[str, torch.Tensor], aliases: dict[str, str]) -> dict[str, torch.Tensor] | None:
        """Return ``tensors``, whole, on the host of the first rank, tied names sharing one; None elsewhere."""
        with self._to_first(tensors) as flow:
            kept = {name: values.to("cpu") for bucket in flow for name, values in bucket}
        return with_aliases(kept, aliases) if self.mesh.first else None

    def consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Return all weights by name on the first rank, else None. Collective. ValueError if parameters are whole."""
        if not self.runtime.plan.regular.param.sharded and self.mesh.tp.size == 1:
            raise ValueError("this function works where parameters are sharded; use module.state_dict() here")
        return self._collected(*state_names(self.module, exclude_frozen=exclude_frozen_parameters))

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return ``module.state_dict()``; sharded entries show their shape and refuse to be read or saved."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        frozen = {prefix + name for name, p in self.module.named_parameters() if not p.requires_grad}
        return {n: v for n, v in state.items() if n not in frozen} if exclude_frozen_parameters else state

    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, custom_load_fn: Any = None
    ) -> None:
        """Load whole weights (the same dict on every rank) into the module; masters follow. Collective."""
        if self.runtime.worker is not None:
            self._checks.begin_collective()
        self.runtime.update.publish()
        with GatheredParameters(self.module.parameters(), modifier_rank=self.mesh.sharers(self.mesh.zero.ranks[0])[0]):
            if custom_load_fn is not None:
                custom_load_fn(src=checkpoint, dst=self.module)
            else:
                self.module.load_state_dict(checkpoint, strict=strict)
        for unit in self.runtime.units:
            for position in range(len(unit.params) if not unit.movable else 0):
                unit.absorb(position)
