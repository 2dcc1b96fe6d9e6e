"""Where an engine learns how many ranks share each layer, and has them split: configuration, ``tp_model_init``, mpu."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.device import DTYPES
from deepspeed.client.mpu import Ways
from deepspeed.comm.collectives import failures, gather_objects
from deepspeed.comm.mesh.groups import Mesh, plain_mesh
from deepspeed.config import DeepSpeedConfig, load_config
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError, NotYetError, UsageError
from deepspeed.optim.registry import granularity
from deepspeed.tensor.apply import parallelize


@dataclass(frozen=True)
class Recorded:
    """Arguments of ``tp_model_init`` for a model."""

    size: int
    dtype: torch.dtype | None
    group: Any = None


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, **kwargs: Any) -> nn.Module:
    """Record that ``tp_size`` ranks share the layers of ``model``, which ``initialize`` will split. Returns ``model``.

    ``tp_group``: their process group. Raises DeepSpeedConfigError for a size below 1, or another than before.
    """
    if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
        raise DeepSpeedConfigError(f"tp_model_init: tp_size is a number of ranks, at least 1, not {tp_size!r}")
    name = str(dtype).removeprefix("torch.")
    parsed = dtype if isinstance(dtype, torch.dtype) or dtype is None else DTYPES.get(name, getattr(torch, name, None))
    recorded = Recorded(tp_size, parsed, kwargs.get("tp_group"))
    before = getattr(model, "ds_tensor_parallel", recorded)
    if before != recorded:
        raise DeepSpeedConfigError(
            f"tp_model_init: the model was recorded with {before} before, and now with {recorded}"
        )
    model.ds_tensor_parallel = recorded  # type: ignore[assignment]
    return model


def configured(model: nn.Module, source: Any, axes: Ways, ranks: int) -> tuple[DeepSpeedConfig, Ways]:
    """Return the configuration for ``ranks`` ranks of one data axis, and their cut. Collective with a ``tp_group``.

    Raises DeepSpeedConfigError where configuration, ``tp_model_init`` and mpu do not agree.
    """
    recorded: Recorded | None = getattr(model, "ds_tensor_parallel", None) or _distributed(model)
    tp_size = 1 if axes.tp > 1 else None if recorded is None else recorded.size
    if tp_size is not None and ranks % tp_size:
        raise DeepSpeedConfigError(f"{tp_size} tensor-parallel ranks do not divide {ranks} ranks; use a divisor")
    cfg = load_config(source, world_size=ranks, tp=tp_size, sp=None if axes.order is None else 1)
    axes = _with_sequences(cfg, axes)
    size = cfg.tensor_parallel.autotp_size
    sizes = {"mpu": axes.tp if axes.tp > 1 else None, "tp_model_init": recorded and recorded.size}
    for who, other in sizes.items():
        if other and size not in (0, other):
            raise DeepSpeedConfigError(
                f"tensor_parallel.autotp_size is {size}, but {who} says {other}; make them equal"
            )
    if recorded is not None and recorded.group is not None:
        if axes.known:
            raise UsageError("tp_model_init(tp_group=...) and mpu both bring process groups; pass one of them")
        return cfg, _of_group(recorded.group, axes)
    if axes.tp == 1:
        if axes.order is not None and cfg.tensor_parallel.ways > 1:
            raise DeepSpeedConfigError(
                f"tensor_parallel.autotp_size is {size}, but the mpu or mesh_param that deepspeed.initialize got cuts "
                "all ranks without tensor parallelism; say sequence_parallel_size in the configuration instead"
            )
        axes = replace(axes, tp=recorded.size if recorded is not None else cfg.tensor_parallel.ways)
    return cfg, axes


def _with_sequences(cfg: DeepSpeedConfig, axes: Ways) -> Ways:
    """Return ``axes`` with the ranks that share one sequence by the configuration, unless the client has cut all."""
    size, stated = cfg.sequence_parallel_size, axes.order is not None or axes.group is not None
    if size is not None and stated and size != axes.sp:
        raise DeepSpeedConfigError(
            f"sequence_parallel_size is {size}, but {axes.sp} ranks share each sequence by the mpu or mesh_param that "
            "deepspeed.initialize got; make them equal, or delete one"
        )
    return axes if stated else replace(axes, sp=cfg.sequence_ways)


def _distributed(model: nn.Module) -> Recorded | None:
    """Return the size and group of the mesh of DTensor parameters, which the client distributed; None without any."""
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and hasattr(parameter, "placements") and mesh.ndim == 1:
            return Recorded(mesh.size(), None, mesh.get_group())
    return None


def _of_group(group: Any, axes: Ways) -> Ways:
    """Return ``axes`` with the ranks of all such groups, one group after the other. Collective."""
    local = plain_mesh("gloo", group=group).job
    job = plain_mesh("gloo", group=axes.group).job
    groups = sorted(set(gather_objects(local.ranks, job)))
    order = tuple(rank for ranks in groups for rank in ranks)
    if sorted(order) != sorted(job.ranks) or len({len(ranks) for ranks in groups}) > 1:
        raise DeepSpeedConfigError(f"the tensor-parallel groups {groups} do not divide the {job.size} ranks evenly")
    return replace(axes, tp=local.size, order=order, known=(*axes.known, group))


def split(
    model: nn.Module, cfg: DeepSpeedConfig, mesh: Mesh, optimizer: torch.optim.Optimizer | None, lasting: ExitStack
) -> None:
    """Replace the layers of ``model`` by parts, unless it brings its own; ``lasting`` undoes it."""
    if mesh.tp.size == 1:
        return
    if optimizer is not None and granularity(optimizer) == "parameter":
        raise NotYetError(
            f"{type(optimizer).__name__} looks at whole tensors, of which a tensor-parallel rank has a part; that is "
            "not in this release. Use an element-wise optimizer (AdamW, SGD, Lion), or no tensor parallelism"
        )
    fault: DeepSpeedError | None = None
    if cfg.tensor_parallel.ways > 1 or hasattr(model, "ds_tensor_parallel"):
        try:
            parallelize(model, mesh, cfg.tensor_parallel, lasting)
        except DeepSpeedError as error:
            fault = error
    for rank, text in failures(fault, mesh.job).items():  # stages have different layers, and wait for each other
        raise fault or DeepSpeedConfigError(f"{mesh.title(rank)}: {text}")
