"""zero.Init: build a model that never exists whole on any rank.

A module's parameters are cut into shards as soon as the module is attached to its parent (torch's global registration
hooks tell when), so at most one small subtree is whole at a time. A sharded parameter that code touches again, such as
by ``self.apply(init_weights)``, is gathered on demand and cut again afterwards; values come from rank 0.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from deepspeed.accelerator.device import DTYPES, get_accelerator, take_device
from deepspeed.client.zero.incoming import Incoming, follow_transformers
from deepspeed.comm import collectives
from deepspeed.comm.init import init_distributed
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.config import DeepSpeedConfig, load_config
from deepspeed.errors import NotYetError, UsageError
from deepspeed.monitor import hostmem
from deepspeed.zero.build import memory_of_ranks
from deepspeed.zero.layout import Granularity, build_layout
from deepspeed.zero.memory.fit import limits_present
from deepspeed.zero.memory.tiers import Tiers
from deepspeed.zero.module.attributes import mark_zero_parameter
from deepspeed.zero.param import castable, is_composed
from deepspeed.zero.partition import UnitFacts, statistics_dtypes
from deepspeed.zero.plan import TIERS, OffloadPlan, Spread, StatePlan, Tier, UnitPlan, make_plan
from deepspeed.zero.unit import Unit, UnitState

_CONSTRUCTORS = ("empty", "zeros", "ones", "full", "arange", "eye")
_LEAST_AWAY = 1 << 14
_orig_torch_arange = torch.arange
# Single-parameter units get ascending numbers in construction order, which is the same on every rank.
_numbers = count()


def zero_wrapper_for_fp_tensor_constructor(
    fn: Any, target_fp_dtype: torch.dtype | None, *, target_device: Any = None
) -> Any:
    """Wrap a tensor constructor: floating results are of ``target_fp_dtype`` (None: as ever) on ``target_device``.

    ``torch.arange`` is left alone: positions and ids computed in 16 bits are silently wrong. Clients replace this
    function on ``deepspeed.runtime.zero.partition_parameters`` while they build a model.
    """
    if fn is _orig_torch_arange:
        return fn

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if target_device is not None and kwargs.get("device") is None and torch.get_default_device().type != "meta":
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        cast = kwargs.get("dtype") is None and target_fp_dtype is not None and made.is_floating_point()
        return made.to(target_fp_dtype) if cast else made

    return wrapped


class Init:
    """Shard a model's parameters during construction; see the module's docstring. ``module``: sharded at once.

    ``config_dict_or_path`` decides the dtype (bf16 or fp16 when enabled, else fp32) unless ``dtype`` is given. The
    shards rest where ``remote_device`` ("cpu", "nvme") says, else where the configuration's ``offload_param`` does;
    "nvme" takes the folder from there. ``enabled=False`` does nothing at all. Nested uses keep the outer one.
    Collective: every rank constructs the same model.
    """

    # How much of what constructors touched again may stay gathered: so many parameters, more up to so many elements.
    kept_units = 4
    kept_numel = 1 << 24
    building = True  # as long as it keeps units there is no engine
    in_backward = False
    # The context in force. Construction hooks are global by nature, so there can be one only.
    _active: "Init | None" = None

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        self._enabled = enabled
        if not enabled:
            return
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise NotYetError("quantized weights in zero.Init are not in this release")
        init_distributed(verbose=False)
        group = sequence_data_parallel_group or data_parallel_group
        if group is None and mpu is not None:
            group = mpu.get_data_parallel_group()
        self.mesh = plain_mesh(get_accelerator().communication_backend_name(), group=group)
        source = config_dict_or_path if config_dict_or_path is not None else config
        cfg = load_config(source, world_size=self.mesh.data.size, lenient=True) if source else None
        self.dtype = dtype or (DTYPES[cfg.compute_dtype] if cfg is not None else torch.float32)
        self._facts = UnitFacts(self.mesh, sanity_checks=cfg is not None and cfg.zero.enable_sanity_checks)
        self.device = take_device(int(os.environ.get("LOCAL_RANK", "0")))
        self._tier, offload = _rest_tier(remote_device, cfg, self.mesh.zero.size)
        if self._tier is Tier.NVME and not offload.host_limit:
            present = limits_present(memory_of_ranks(self.mesh))
            # No more than half of what there is waits in memory: initialize needs some too.
            room = (present.host - present.host_used) // 2 // self.dtype.itemsize
            if present.host:
                offload = replace(offload, host_param_numel=min(offload.host_param_numel, room))
        self._tiers = Tiers(offload, self.device, keep=False)
        if self.device.type == "cpu":
            hostmem.return_large_blocks()
        self._heap = hostmem.HeapTrimmer()
        self.incoming: Incoming | None = None
        self._open: dict[int, nn.Module] = {}
        self._dirty: list[Unit] = []
        self._undo: list[Callable[[], None]] = []  # what the context in force has changed outside
        if module is not None:
            self._cut_tree(module)

    def __enter__(self) -> "Init":
        if self._enabled and Init._active is None:
            Init._active = self
            self._start()
            follow_transformers()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if not self._enabled or Init._active is not self:
            return
        Init._active = None
        try:
            if kind is None:
                for module in list(self._open.values()):
                    self._cut_tree(module)
                self._cut_dirty()
        finally:
            self._open.clear()
            self._stop()

    def _start(self) -> None:
        self._undo = [
            register_module_module_registration_hook(self._submodule_attached).remove,
            register_module_parameter_registration_hook(self._parameter_registered).remove,
        ]
        # Clients patch the wrapper on this module (and only there) before entering, so it is looked up there, now.
        public = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
        wrapper = getattr(public, "zero_wrapper_for_fp_tensor_constructor", zero_wrapper_for_fp_tensor_constructor)
        # torch.device contexts list torch's constructors once, at their first use: not our wrappers, please.
        with torch.device("cpu"):
            torch.empty(0)
        for name in _CONSTRUCTORS:
            original = getattr(torch, name)
            self._undo.append(functools.partial(setattr, torch, name, original))
            # No dtype: what becomes a parameter is rounded when it is cut, and what becomes a buffer never.
            setattr(torch, name, wrapper(original, None, target_device=self.device))
        if nn.init.uniform_.__module__ != nn.init.__name__:  # off, as Transformers has them around its constructors
            empty: Any = torch.empty
            torch.empty = lambda *args, **kwargs: _void(empty(*args, **kwargs))

    def _stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _parameter_registered(self, module: nn.Module, _: str, param: nn.Parameter | None) -> None:
        if param is not None and not hasattr(param, "_ds_unit"):
            self._open[id(module)] = module

    def _submodule_attached(self, _: nn.Module, __: str, child: nn.Module | None) -> None:
        if child is not None:
            self._cut_dirty()
            self._cut_tree(child)

    def _cut_tree(self, module: nn.Module) -> None:
        beside = statistics_dtypes(module)
        for part in module.modules():
            self._open.pop(id(part), None)
            if any(p.is_meta and not hasattr(p, "_ds_unit") for p in part.parameters(recurse=False)):
                self._materialise(part)
            for leaf, param in part.named_parameters(recurse=False):
                if not hasattr(param, "_ds_unit") and not is_composed(param):
                    dtype = beside.get(param, self.dtype) if castable(param.dtype) else param.dtype
                    self._cut(param, f"{type(part).__name__}.{leaf}", dtype)

    def _materialise(self, module: nn.Module) -> None:
        """Give a meta module memory and its own initial values, if it has any."""
        with torch.device(self.device):
            module.to_empty(device=self.device, recurse=False)
            for param in module.parameters(recurse=False):
                _void(param)
            getattr(module, "reset_parameters", lambda: None)()

    def cut_copy(self, param: nn.Parameter, unit: Unit) -> nn.Parameter:
        """Shard ``param``, a whole copy of the parameter of ``unit``; it becomes this rank's shard."""
        self._cut(param, unit.name, unit.dtype)
        return param

    def _cut(self, param: nn.Parameter, name: str, dtype: torch.dtype) -> None:
        """Turn one whole parameter into this rank's shard, in ``dtype``, with the values of rank 0."""
        layout = build_layout([(name, tuple(param.shape), 0)], self.mesh.zero.size, Granularity.ELEMENT)
        # A drive transfers pages: what is smaller than a few of them stays in memory.
        tier = self._tier if param.numel() >= _LEAST_AWAY else Tier.DEVICE
        plan = UnitPlan(StatePlan((Spread.SHARDED,), tier), None, None)
        unit = Unit(next(_numbers), name, [param], layout=layout, plan=plan, facts=self._facts)
        with torch.no_grad():
            values = torch.zeros(layout.numel, dtype=dtype, device=self.device)
            Unit.view(values, layout.segments[0]).copy_(param)
            collectives.broadcast(values, self.mesh.zero)
            unit.adopt(values, dtype, keep_master=False, tiers=self._tiers)
        if self.device.type == "cpu":
            self._heap.passed(2 * values.nbytes)
        unit.keep_by(lambda: self)
        mark_zero_parameter(param, unit, 0, name=name)

    def may_fetch_on_demand(self) -> bool:
        return bool(self._undo)

    def fetch_on_demand(self, unit: Unit) -> bool:
        if not self._undo:
            return False
        unit.fetch_whole()
        unit.add_user()  # until it is cut again
        self._dirty.append(unit)
        # One walk over the whole tree, as apply(init_weights) is, must not leave the whole model behind it. The latest
        # few stay: code may hold views of several parameters at once.
        self._cut_dirty(self.kept_units, self.kept_numel)
        return True

    def _cut_dirty(self, keep: int = 0, keep_numel: int = -1) -> None:
        """Shard units touched again, oldest first, down to ``keep`` units, or to ``keep_numel`` elements in all."""
        while len(self._dirty) > keep and sum(u.layout.numel for u in self._dirty) > keep_numel:
            unit = self._dirty.pop(0)
            unit.drop_user()
            if unit.params and unit.idle and unit.state is UnitState.READY:
                with torch.no_grad():
                    collectives.broadcast(unit.buffer.full, self.mesh.zero)
                    unit.absorb(0)
                unit.release()

    def need(self, units: Iterable[Unit]) -> None:
        for unit in units:
            unit.fetch_whole()

    def meet(self) -> int:
        return 0  # constructors gather in one order

    def before_update(self) -> None:
        """Do nothing: no save copies the shards of this context."""


def _void(tensor: torch.Tensor) -> torch.Tensor:
    """Put NaN at both ends of ``tensor``: values that nobody writes shall not pass for weights, nor cost memory."""
    for end in (slice(1), slice(-1, None)) if castable(tensor.dtype) and tensor.layout is torch.strided else ():
        tensor.detach().flatten()[end] = torch.nan
    return tensor


def _rest_tier(remote_device: str | None, cfg: DeepSpeedConfig | None, world_size: int) -> tuple[Tier, OffloadPlan]:
    """Return the tier where shards wait for ``initialize``, and the offload plan. UsageError for other tiers."""
    offload = make_plan(cfg, world_size).offload if cfg is not None else OffloadPlan()
    wanted = remote_device or ("none" if cfg is None else cfg.zero.param_tier.value)
    if wanted not in TIERS:
        raise UsageError(f"zero.Init(remote_device={remote_device!r}): the places are 'cpu' and 'nvme'")
    if wanted == "nvme" and not offload.param_folder:
        raise UsageError(
            "zero.Init(remote_device='nvme') needs a folder on the drive: pass config_dict_or_path with "
            "zero_optimization.offload_param.nvme_path"
        )
    anyway = wanted == get_accelerator().device_name()  # where the device is the host, its shards are in host memory
    return (Tier.DEVICE if anyway else TIERS[wanted]), offload


def shutdown_init_context() -> Init | None:
    """Suspend the active context (initialize does this); return it for ``restore_init_context``."""
    if (active := Init._active) is not None:
        active._stop()
        Init._active = None
    return active


def restore_init_context(active: Init | None = None) -> None:
    """Resume the context that ``shutdown_init_context`` suspended."""
    if active is not None and Init._active is None:
        Init._active = active
        active._start()
