"""How much memory the model states need, before anything is started.

Notation of the formulas: P parameters, L parameters of the largest layer, n devices per node, N nodes, G = n * N, f the
factor for buffers. Mixed precision with Adam: 2 bytes compute parameters + 2 gradients + 12 fp32 master and moments + 2
spare = 18 bytes a parameter; 4 bytes a parameter while a model is built unsharded. Activations are not included.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

_GIB = 2**30


class Zero3Needs(NamedTuple):
    """Bytes per node in host memory, bytes per device, and the share of the device for the largest layer."""

    cpu: int
    gpu: int
    largest_layer: int


class Zero2Needs(NamedTuple):
    """Bytes per node in host memory and bytes per device."""

    cpu: int
    gpu: int


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> Zero3Needs:
    """Needs with parameters, gradients and optimizer states sharded; returns (cpu, gpu, largest layer) in bytes."""
    params, per_node, nodes, factor = total_params, num_gpus_per_node, num_nodes, additional_buffer_factor
    devices = per_node * nodes
    largest = 4 * largest_layer_params
    unsharded = 0 if zero_init else 4 * params * per_node  # every process of a node builds the whole model first
    gpu: float
    cpu: float
    if cpu_offload and cpu_offload_params:
        gpu, cpu = largest, max(unsharded, 18 * params / nodes) * factor
    elif cpu_offload:
        gpu, cpu = largest + 2 * params / devices, max(unsharded, 16 * params / nodes) * factor
    else:
        gpu, cpu = largest + 18 * params / devices, (unsharded or 4 * largest_layer_params * per_node) * factor
    return Zero3Needs(int(cpu), int(gpu), largest)


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> Zero2Needs:
    """Needs with gradients and optimizer states sharded; returns (cpu, gpu) in bytes."""
    params, devices = total_params, num_gpus_per_node * num_nodes
    if cpu_offload:
        return Zero2Needs(int(params * max(4 * devices, 16) * additional_buffer_factor), 2 * params)
    gpu = 2 * params + int(18 * params / devices)
    return Zero2Needs(int(4 * params * num_gpus_per_node * additional_buffer_factor), gpu)


def model_size(model: torch.nn.Module) -> tuple[int, int]:
    """(all parameters, parameters of the largest layer) of ``model``; shared parameters count once, sharded ones in
    full.
    """

    def numel(params: dict[int, torch.nn.Parameter]) -> int:
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in params.values())

    layers = ({id(p): p for p in module.parameters(recurse=False)} for module in model.modules())
    return numel({id(p): p for p in model.parameters()}), max((numel(layer) for layer in layers), default=0)


def _write_table(title: list[str], rows: Sequence[tuple[int, int, str]]) -> None:
    lines = [*title, "  per CPU  |  per GPU |   Options"]
    lines += [f"{cpu / _GIB:8.2f}GB | {gpu / _GIB:6.2f}GB | {options}" for cpu, gpu, options in rows]
    sys.stdout.write("\n".join(lines) + "\n")


def _title(total: int, detail: str, per_node: int, nodes: int) -> list[str]:
    return [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {per_node} GPU{'s' * (per_node > 1)} per node.",
        f"SW: Model with {total / 1e6:.0f}M total params{detail}.",
    ]


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Write a table of needs for every offload choice to standard output, from parameter counts alone."""
    rows = []
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            needs = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                cpu_offload=offload,
                cpu_offload_params=offload_params,
                zero_init=zero_init,
                additional_buffer_factor=additional_buffer_factor,
            )
            devices = ["cpu" if chosen else "none" for chosen in (offload_params, offload)]
            options = f"offload_param={devices[0]:<4}, offload_optimizer={devices[1]:<4}, zero_init={int(zero_init)}"
            rows.append((needs.cpu, needs.gpu, options))
    detail = f", {largest_layer_params / 1e6:.0f}M largest layer params"
    _write_table(_title(total_params, detail, num_gpus_per_node, num_nodes), rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write the table for a model object to standard output."""
    total, largest = model_size(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write a table of needs with and without offload to standard output, from the parameter count alone."""
    rows = []
    for offload in (True, False):
        needs = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append((needs.cpu, needs.gpu, f"offload_optimizer={'cpu' if offload else 'none'}"))
    _write_table(_title(total_params, "", num_gpus_per_node, num_nodes), rows)


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write the table for a model object to standard output."""
    estimate_zero2_model_states_mem_needs_all_cold(
        model_size(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor
    )
