"""Spreading the experts of a model over ranks: which modules are experts, and what replaces their forward."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.client.comm.groups import hold_registered
from deepspeed.comm.collectives import AxisGroup
from deepspeed.comm.mesh.groups import Mesh, plain_mesh, with_experts
from deepspeed.comm.mesh.topology import dense_topology
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.model.expert_parallel import ExpertParallelConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.moe.exchange import through_experts
from deepspeed.moe.layer import MoE
from deepspeed.moe.loads import ExpertLoads
from deepspeed.moe.utils import GROUP_NAME, is_moe_param, stacked_experts
from deepspeed.monitor.log import log_dist
from deepspeed.optim.registry import granularity
from deepspeed.tensor.parts import guard_saving, put_back
from deepspeed.zero.layout import Place
from deepspeed.zero.partition import UnitFacts

FactsOf = Callable[[str, nn.Parameter], UnitFacts]
_DISPATCHES = "ep_dispatch_experts"  # what transformers calls the place where tokens go to other ranks


def spread_experts(
    model: nn.Module,
    config: DeepSpeedConfig,
    mesh: Mesh,
    back: ExitStack,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[Mesh, dict[str, Mesh], ExpertLoads]:
    """Divide the experts of ``model`` over ranks; return ``mesh`` with their groups, and the mesh of each group name.

    Those of ``deepspeed.moe.layer.MoE`` say by themselves over how many; stacked ones of Transformers go by the block
    ``expert_parallel``. ``back`` restores the modules. The parameters stay the same objects, and are cut when ZeRO
    takes them over. Loads are counted for monitors, and to balance them. Raises DeepSpeedConfigError where numbers do
    not divide, a pattern matches nothing, or ``optimizer`` looks at more than a rank has of the stacked ones; nothing
    has changed then.
    """
    block = config.expert_parallel
    balance = block.load_balance_coeff if block.enabled else None
    if block.ways > 1 and mesh.pp.size > 1:
        raise DeepSpeedConfigError(
            "expert_parallel is for models of Transformers, not for pipeline stages: delete the block, and build the "
            "layers with deepspeed.moe.layer.MoE"
        )
    _check_optimizer(optimizer, block)
    if config.use_data_before_expert_parallelism:
        mesh = _data_first(mesh, back)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, MoE)}
    stacked = dict(_stacked(model, block)) if block.ways > 1 or balance is not None else {}
    loads = ExpertLoads(balance)
    if balance is not None or config.monitor_config.enabled:
        for path, module in stacked.items():
            loads.watch(model, path, _adapted(module)[0], block.autoep_size, back)
        for path, layer in layers.items():
            loads.watch(model, path, layer.deepspeed_moe, layer.ep_size, back)
    sizes = [*(layer.ep_size for layer in layers.values()), *([block.ways] if stacked else [])]
    meshes: dict[str, Mesh] = {}
    for ways in dict.fromkeys(size for size in sizes if size > 1):
        mesh, meshes[GROUP_NAME.format(ways)] = with_experts(mesh, ways)
    for path, layer in layers.items():
        layer.deepspeed_moe.path = path
        if layer.ep_size > 1:
            layer.set_group(meshes[layer.expert_group_name].tp, mesh.tp)
            layer.deepspeed_moe.experts.mark()  # type: ignore[operator]
    for path, module in stacked.items() if block.ways > 1 else ():
        group = meshes[GROUP_NAME.format(block.ways)].tp
        _divide(module, group, mesh.tp, block.expert_tensor_parallel_size, back, layer=path)
    if stacked and block.ways > 1:
        guard_saving(model, back)
        number = _adapted(next(iter(stacked.values())))[0].num_experts
        log_dist(f"expert parallelism over {block.ways} ranks: {len(stacked)} layers, {number} experts on each rank")
    return mesh, meshes, loads


def _check_optimizer(optimizer: torch.optim.Optimizer | None, block: ExpertParallelConfig) -> None:
    """Raise DeepSpeedConfigError where ``optimizer`` looks at whole tensors, of which a rank has some experts."""
    by_matrix = getattr(optimizer, "by_matrix", False) and block.expert_tensor_parallel_size == 1
    if block.ways > 1 and optimizer is not None and granularity(optimizer) == "parameter" and not by_matrix:
        raise DeepSpeedConfigError(
            f"expert_parallel: {type(optimizer).__name__} looks at whole tensors, of which a rank has some experts or "
            "parts of them; use an element-wise optimizer (AdamW, SGD, Lion), or Muon without "
            "expert_tensor_parallel_size"
        )


def _data_first(mesh: Mesh, back: ExitStack) -> Mesh:
    """Return ``mesh`` in whose topology neighbours hold the same experts; the getters of groups know it."""
    if mesh.tp.size > 1:
        raise DeepSpeedConfigError(
            "use_data_before_expert_parallelism cannot be combined with tensor parallelism, whose neighbours divide "
            "the experts; set it to false"
        )
    topology = replace(mesh.topology or dense_topology(mesh.job.ranks), data_first=True)
    back.callback(hold_registered("topology", topology).give_back)
    return replace(mesh, topology=topology)


def facts_with_experts(facts: UnitFacts, facts_of: FactsOf | None, meshes: dict[str, Mesh]) -> FactsOf | None:
    """Return the function of a parameter's facts: ``facts`` in the mesh of experts for these, else by ``facts_of``."""
    if not meshes:
        return facts_of
    alone = plain_mesh("none", group=None).tp
    cut = {name: replace(facts, mesh=mesh) for name, mesh in meshes.items()}
    single = {name: replace(facts, mesh=replace(mesh, tp=alone)) for name, mesh in meshes.items()}

    def choose(name: str, param: nn.Parameter) -> UnitFacts:
        if is_moe_param(param) and (group := getattr(param, "group_name", "")) in cut:
            return cut[group] if hasattr(param, "tp_place") else single[group]
        return facts if facts_of is None else facts_of(name, param)

    return choose


def _stacked(model: nn.Module, block: ExpertParallelConfig) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of the stacked experts of ``model``. DeepSpeedConfigError where there are none."""
    if block.moe_layer_pattern is None:
        plans = [getattr(m.config, "base_model_ep_plan", None) or {} for m in model.modules() if hasattr(m, "config")]
        paths = {path for plan in plans for path, what in plan.items() if what == _DISPATCHES}
        if block.expert_pattern is not None and not any(p.endswith(f".{block.expert_pattern}") for p in paths):
            raise DeepSpeedConfigError(
                f"expert_parallel.expert_pattern {block.expert_pattern!r} says where the experts are in the layers of "
                "moe_layer_pattern, which is not set; set it, or delete expert_pattern"
            )
        patterns = [re.escape(path).replace(r"\*", r"\d+") for path in paths]
        source = f"the plan of the model's configuration (base_model_ep_plan: {sorted(paths) or 'there is none'})"
    else:
        patterns = [f"(?:{block.moe_layer_pattern})\\.{block.expert_pattern or 'experts'}"]
        source = f"expert_parallel.moe_layer_pattern {block.moe_layer_pattern!r}"
        if block.expert_pattern is not None:
            source += f" with expert_pattern {block.expert_pattern!r}"
    try:
        compiled = [re.compile(rf"(?:^|\.){pattern}$") for pattern in patterns]
    except re.error as error:
        raise DeepSpeedConfigError(f"{source} is no regular expression: {error}") from None
    matching = {
        path: module for path, module in model.named_modules() if any(pattern.search(path) for pattern in compiled)
    }
    if not matching:
        raise DeepSpeedConfigError(
            f"expert_parallel is enabled, but {source} matches no module of {type(model).__name__}. "
            "Set moe_layer_pattern to the paths of its mixture-of-experts layers, or enabled to false"
        )
    for path, module in matching.items():
        module, adapters = _adapted(module)
        number = stacked_experts(module) if _routes(module) else 0
        if any(not hasattr(adapter, "get_delta_factors") for adapter in adapters):
            raise DeepSpeedConfigError(f"expert_parallel: adapters on {path} need PEFT 0.21 or later; update it")
        if not number:
            raise DeepSpeedConfigError(
                f"expert_parallel: {path} is a {type(module).__name__}, whose experts are no stacked tensors (experts "
                "first, num_experts of them, called with tokens, chosen experts and weights) as those of Transformers "
                "5; use deepspeed.moe.layer.MoE for it"
            )
        if number % block.autoep_size:
            raise DeepSpeedConfigError(
                f"expert_parallel.autoep_size {block.autoep_size} does not divide the {number} experts of {path}; use "
                f"a divisor of {number}"
            )
        etp = block.expert_tensor_parallel_size
        for name, param in module.named_parameters() if etp > 1 else ():  # also of a norm, which needs whole outputs
            inner_cut(module, name, param, etp, at=path)
        yield path, matching[path]


def _adapted(module: nn.Module) -> tuple[nn.Module, list[Any]]:
    """Return the experts inside of adapters that PEFT puts on their tensors (``target_parameters``), and these."""
    adapters: list[Any] = []
    while hasattr(module, "base_layer") and hasattr(module, "parameter_name"):
        adapters.append(module)
        module = module.base_layer  # type: ignore[assignment]
    return module, adapters


def _routes(module: nn.Module) -> bool:
    """Tell whether ``module`` is called with tokens, the experts chosen for them, and their weights."""
    try:
        inspect.signature(module.forward).bind("hidden", "index", "weights")
    except TypeError:
        return False
    return True


def inner_cut(module: nn.Module, name: str, param: nn.Parameter, etp: int, *, at: str) -> tuple[int, int]:
    """Return the dimension along which ``etp`` ranks cut parameter ``name`` of stacked experts, and the number of equal
    parts packed there: 2 for gate and up projection in halves. Raises DeepSpeedConfigError where they cannot.
    """
    transposed, halves = getattr(module, "is_transposed", False), getattr(module, "is_concatenated", True)
    down = name.startswith("down_proj")
    dim = 1 if param.dim() == 2 or transposed is down else 2
    packed = 2 if name.startswith("gate_up") and halves else 1
    fault = ""
    if param.dim() < 2 or not name.startswith(("gate_up_proj", "up_proj", "gate_proj", "down_proj")):
        fault = "is not known"
    elif param.dim() == 2 and down:
        fault = "is a bias that each of them would add"
    elif transposed and packed > 1:
        fault = "has its halves in the last dimension"
    elif param.shape[dim] % (packed * etp):
        fault = f"has an inner width of {param.shape[dim] // packed}"
    if fault:
        raise DeepSpeedConfigError(
            f"expert_parallel.expert_tensor_parallel_size {etp}: {at}.{name} {fault}; choose a divisor of the inner "
            "width, or 1"
        )
    return dim, packed


def _place(shape: tuple[int, ...], experts: range, *, dim: int, packed: int, part: int, etp: int) -> Place:
    """Return the place of these ``experts``, and of the ``part`` among ``etp`` of what is packed along ``dim``."""
    first, count, width = experts.start, len(experts), shape[dim] // (packed * etp)
    boxes = []
    # Halves of one expert follow each other in memory, so that each of them is a box.
    for start, number in ((e, 1) for e in experts) if packed > 1 else ((first, count),):
        for half in range(packed):
            corner, size = [start, *(0 for _ in shape[1:])], [number, *shape[1:]]
            corner[dim], size[dim] = half * shape[dim] // packed + part * width, width
            boxes.append((tuple(corner), tuple(size)))
    whole = [count, *shape[1:]]
    whole[dim] //= etp
    return Place(tuple(boxes), tuple(whole), shape)


def _divide(module: nn.Module, group: AxisGroup, sharers: AxisGroup, etp: int, back: ExitStack, *, layer: str) -> None:
    """Let ``module`` compute this rank's part of its experts, for the tokens of all ranks of ``group``: ``etp`` ranks
    share each expert. Those of ``sharers`` have the same tokens. Adapters on the experts stay whole on each rank.
    Errors name it ``layer``.
    """
    module, adapters = _adapted(module)
    for adapter in adapters:
        _cut_adapter(adapter, group, etp, back)
    number: int = module.num_experts  # type: ignore[assignment]
    local = number * etp // group.size
    first = group.index // etp * local
    for name, param in module.named_parameters(recurse=False):
        shape, size = tuple(param.shape), (local, *param.shape[1:])
        place = Place((((first, *(0 for _ in shape[1:])), size),), size, shape)
        if etp > 1:
            dim, packed = inner_cut(module, name, param, etp, at="")
            experts = range(first, first + local)
            place = _place(shape, experts, dim=dim, packed=packed, part=group.index % etp, etp=etp)
        marks = {"tp_place": place, "allreduce": False, "group_name": GROUP_NAME.format(group.size)}
        for mark, value in marks.items():
            setattr(param, mark, value)
        back.callback(_unmark, param, marks)
    compute = module.forward

    def forward(hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        where = {"group": group, "sharers": sharers, "experts": local, "etp": etp, "layer": layer}
        out: torch.Tensor = through_experts(flat, index, weights, compute=compute, **where)  # type: ignore[arg-type]
        return out.view(hidden_states.shape)

    back.callback(setattr, module, "num_experts", number)
    back.callback(put_back, module, "forward", vars(module).get("forward"))
    module.num_experts, module.forward = local, forward  # type: ignore[assignment]


def _cut_adapter(adapter: Any, group: AxisGroup, etp: int, back: ExitStack) -> None:
    """Let ``adapter`` change only this rank's part of the experts, from factors of all experts.

    Each rank has them whole, with a gradient from its own experts: the sum over all ranks is that of one process.
    """
    whole, experts, name = adapter.get_delta_factors, adapter.get_base_layer(), adapter.parameter_name
    number, part, all_experts = experts.num_experts, group.index % etp, tuple(adapter.get_param().shape)
    local = number * etp // group.size
    first = group.index // etp * local
    dim, packed = inner_cut(experts, name, adapter.get_param(), etp, at="") if etp > 1 else (0, 1)

    def get_delta_factors(adapter_name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        *factors, scaling = whole(adapter_name)
        if tuple(adapter.get_param().shape) == all_experts:  # as when they are merged into gathered weights
            return factors[0], factors[1], scaling
        factors = [factor[first : first + local] for factor in factors]
        if etp > 1:  # (experts, rows, rank) x (experts, rank, columns)
            some = factors[dim - 1].unflatten(dim, (packed, etp, -1)).select(dim + 1, part)
            factors[dim - 1] = some.flatten(dim, dim + 1)
        return factors[0], factors[1], scaling

    def get_delta_weight(adapter_name: str, *_: Any, **__: Any) -> torch.Tensor:
        rows, columns, scaling = get_delta_factors(adapter_name)
        return rows @ columns * scaling

    for method in (get_delta_factors, get_delta_weight):
        setattr(adapter, method.__name__, method)
        back.callback(delattr, adapter, method.__name__)


def _unmark(param: nn.Parameter, marks: dict[str, Any]) -> None:
    for name, mark in marks.items():
        cut = name == "tp_place" and tuple(param.shape) != mark.shape  # who makes it whole needs its place
        if not cut and getattr(param, name, None) is mark:
            delattr(param, name)
