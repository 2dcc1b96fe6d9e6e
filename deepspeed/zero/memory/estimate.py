"""How much memory the model states need, before anything is started.

Notation of the formulas: P parameters, L parameters of the largest layer, n devices per node, N nodes, G = n * N, f the
factor for buffers. Mixed precision with Adam: 2 bytes compute parameters + 2 gradients + 12 fp32 master and moments + 2
spare = 18 bytes a parameter; 4 bytes a parameter while a model is built unsharded. Activations are not included.
"""

import sys

import torch

_GIB = 2**30


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Needs with everything sharded, in bytes: host memory of a node, a device, the largest layer's part of that."""
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
    return int(cpu), int(gpu), largest


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Needs with gradients and optimizer states sharded, in bytes: host memory of a node, a device."""
    params, devices = total_params, num_gpus_per_node * num_nodes
    if cpu_offload:
        return int(params * max(4 * devices, 16) * additional_buffer_factor), 2 * params
    gpu = 2 * params + int(18 * params / devices)
    return int(4 * params * num_gpus_per_node * additional_buffer_factor), gpu


def model_size(model: torch.nn.Module) -> tuple[int, int]:
    """Parameters of ``model`` and of its largest layer; shared ones count once, sharded ones in full."""

    def numel(module: torch.nn.Module, *, recurse: bool) -> int:
        params = {id(p): p for p in module.parameters(recurse=recurse)}
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in params.values())

    return numel(model, recurse=True), max(numel(module, recurse=False) for module in model.modules())


def _write_table(total: int, detail: str, per_node: int, nodes: int, rows: list[tuple[int, int, str]]) -> None:
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {per_node} GPU{'s' * (per_node > 1)} per node.",
        f"SW: Model with {total / 1e6:.0f}M total params{detail}.",
        "  per CPU  |  per GPU |   Options",
        *(f"{cpu / _GIB:8.2f}GB | {gpu / _GIB:6.2f}GB | {options}" for cpu, gpu, options in rows),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Write a table of needs for every offload choice to standard output, from parameter counts alone."""
    rows, sizes = [], (total_params, largest_layer_params, num_gpus_per_node, num_nodes)
    for optimizer, params in ((True, True), (True, False), (False, False)):
        devices = ["cpu" if chosen else "none" for chosen in (params, optimizer)]
        for whole in (True, False):
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                *sizes, optimizer, params, whole, additional_buffer_factor
            )
            options = f"offload_param={devices[0]:<4}, offload_optimizer={devices[1]:<4}, zero_init={int(whole)}"
            rows.append((cpu, gpu, options))
    detail = f", {largest_layer_params / 1e6:.0f}M largest layer params"
    _write_table(total_params, detail, num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write the table for a model object to standard output."""
    sizes = (*model_size(model), num_gpus_per_node, num_nodes)
    estimate_zero3_model_states_mem_needs_all_cold(*sizes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write a table of needs with and without offload to standard output, from the parameter count alone."""
    rows, sizes = [], (total_params, num_gpus_per_node, num_nodes)
    for offload in (True, False):
        cpu, gpu = estimate_zero2_model_states_mem_needs(*sizes, offload, additional_buffer_factor)
        rows.append((cpu, gpu, f"offload_optimizer={'cpu' if offload else 'none'}"))
    _write_table(total_params, "", num_gpus_per_node, num_nodes, rows)


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write the table for a model object to standard output."""
    sizes = (model_size(model)[0], num_gpus_per_node, num_nodes)
    estimate_zero2_model_states_mem_needs_all_cold(*sizes, additional_buffer_factor)
