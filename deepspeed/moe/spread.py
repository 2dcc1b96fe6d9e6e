"""Spreading the experts of a model over ranks: which modules are experts, and what replaces their forward."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives import AxisGroup
from deepspeed.config.model.expert_parallel import ExpertParallelConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.mesh.groups import Mesh, plain_mesh, with_experts
from deepspeed.moe.exchange import through_experts
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import GROUP_NAME, is_moe_param
from deepspeed.observe.log import log_dist
from deepspeed.zero.layout import Place
from deepspeed.zero.partition import UnitFacts

FactsOf = Callable[[str, nn.Parameter], UnitFacts]
_DISPATCHES = "ep_dispatch_experts"  # what transformers calls the place where tokens go to other ranks


def spread_experts(
    model: nn.Module, block: ExpertParallelConfig, mesh: Mesh, back: ExitStack
) -> tuple[Mesh, dict[str, Mesh]]:
    """Divide the experts of ``model`` over ranks; return ``mesh`` with their groups, and the mesh of each group name.

    Those of ``deepspeed.moe.layer.MoE`` say by themselves over how many; stacked ones of Transformers go by ``block``.
    ``back`` restores the modules. The parameters stay the same objects, and are cut when ZeRO takes them over. Raises
    DeepSpeedConfigError where numbers do not divide, or a pattern matches nothing; nothing has changed then.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE) and module.ep_size > 1]
    stacked = dict(_stacked(model, block)) if block.ways > 1 else {}
    meshes: dict[str, Mesh] = {}
    for ep in dict.fromkeys([*(layer.ep_size for layer in layers), *([block.ways] if stacked else [])]):
        mesh, meshes[GROUP_NAME.format(ep)] = with_experts(mesh, ep)
    for layer in layers:
        layer.set_group(meshes[layer.expert_group_name].tp, mesh.tp)
    for module in stacked.values():
        _divide(module, meshes[GROUP_NAME.format(block.ways)].tp, mesh.tp, back)
    if stacked:
        number = _number(next(iter(stacked.values())))
        log_dist(f"expert parallelism over {block.ways} ranks: {len(stacked)} layers of {number} experts")
    return mesh, meshes


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
        patterns = [re.escape(path).replace(r"\*", r"\d+") for path in paths]
        source = f"the plan of the model's configuration (base_model_ep_plan: {sorted(paths) or 'there is none'})"
    else:
        try:
            patterns = [f"(?:{re.compile(block.moe_layer_pattern).pattern})\\.{block.expert_pattern or 'experts'}"]
        except re.error as error:
            raise DeepSpeedConfigError(
                f"expert_parallel.moe_layer_pattern {block.moe_layer_pattern!r} is no regular expression: {error}"
            ) from None
        source = f"expert_parallel.moe_layer_pattern {block.moe_layer_pattern!r}"
    matching = {
        path: module
        for path, module in model.named_modules()
        if any(re.search(rf"(?:^|\.){pattern}$", path) for pattern in patterns)
    }
    if not matching:
        raise DeepSpeedConfigError(
            f"expert_parallel.autoep_size is {block.ways}, but {source} matches no module of {type(model).__name__}. "
            "Set moe_layer_pattern to the paths of its mixture-of-experts layers, or enabled to false"
        )
    for path, module in matching.items():
        number = _number(module)
        if not number:
            raise DeepSpeedConfigError(
                f"expert_parallel: {path} is a {type(module).__name__}, whose experts are no stacked tensors (experts "
                "first, num_experts of them) as those of Transformers 5; use deepspeed.moe.layer.MoE for it"
            )
        if number % block.ways:
            raise DeepSpeedConfigError(
                f"expert_parallel.autoep_size {block.ways} does not divide the {number} experts of {path}; use a "
                f"divisor of {number}"
            )
        yield path, module


def _number(module: nn.Module) -> int:
    """Return how many experts ``module`` stacks in each of its own parameters; 0 where it does not."""
    number = getattr(module, "num_experts", 0)
    shapes = [tuple(param.shape) for param in module.parameters(recurse=False)]
    return number if isinstance(number, int) and shapes and all(s and s[0] == number for s in shapes) else 0


def _divide(module: nn.Module, group: AxisGroup, sharers: AxisGroup, back: ExitStack) -> None:
    """Let ``module`` compute this rank's part of its experts, for the tokens of all ranks of ``group``; those of
    ``sharers`` have the same ones.
    """
    number: int = module.num_experts  # type: ignore[assignment]
    local = number // group.size
    for param in module.parameters(recurse=False):
        shape = tuple(param.shape)
        size, start = (local, *shape[1:]), (group.index * local, *(0 for _ in shape[1:]))
        marks = {"tp_place": Place(((start, size),), size, shape), "allreduce": False}
        marks["group_name"] = GROUP_NAME.format(group.size)
        for name, mark in marks.items():
            setattr(param, name, mark)
        back.callback(_unmark, param, marks)
    compute = module.forward

    def forward(hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = through_experts(flat, index, weights, group=group, experts=local, compute=compute, sharers=sharers)
        return out.view(hidden_states.shape)

    back.callback(setattr, module, "num_experts", number)
    back.callback(_put_back, module, vars(module).get("forward"))
    module.num_experts, module.forward = local, forward  # type: ignore[assignment]


def _unmark(param: nn.Parameter, marks: dict[str, Any]) -> None:
    for name, mark in marks.items():
        cut = name == "tp_place" and tuple(param.shape) != mark.shape  # who makes it whole needs its place
        if not cut and getattr(param, name, None) is mark:
            delattr(param, name)


def _put_back(module: nn.Module, forward: Any) -> None:
    del module.forward
    if forward is not None:
        module.forward = forward
