"""How much memory the model states need, before anything is started. Activations are not included.

Mixed precision with Adam: 2 bytes compute parameters + 2 gradients + 12 fp32 master and moments + 2 spare = 18 bytes a
parameter; 4 bytes a parameter while a model is built unsharded.
"""

import sys

import torch


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
    """Return bytes with everything sharded: host memory of a node, a device, the largest layer's part of that."""
    largest = 4 * largest_layer_params
    unsharded = 0 if zero_init else 4 * total_params * num_gpus_per_node  # each process builds the whole model first
    # Bytes a parameter that a device holds, and the host.
    gpu, cpu = ((0, 18) if cpu_offload_params else (2, 16)) if cpu_offload else (18, 0)
    host = max(unsharded, cpu * total_params / num_nodes) or largest * num_gpus_per_node
    device = largest + gpu * total_params / (num_gpus_per_node * num_nodes)
    return int(host * additional_buffer_factor), int(device), largest


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return bytes with gradients and optimizer states sharded: host memory of a node, a device."""
    params, devices = total_params, num_gpus_per_node * num_nodes
    if cpu_offload:
        return int(params * max(4 * devices, 16) * additional_buffer_factor), 2 * params
    return int(4 * params * num_gpus_per_node * additional_buffer_factor), 2 * params + int(18 * params / devices)


def model_size(model: torch.nn.Module) -> tuple[int, int]:
    """Count the parameters of ``model`` and of its largest layer; shared ones once, sharded ones in full."""

    def numel(module: torch.nn.Module, *, recurse: bool) -> int:
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in module.parameters(recurse=recurse))

    return numel(model, recurse=True), max(numel(module, recurse=False) for module in model.modules())


def _write_table(total: int, detail: str, per_node: int, nodes: int, rows: list[tuple[int, int, str]]) -> None:
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {per_node} GPU{'s' * (per_node > 1)} per node.",
        f"SW: Model with {total / 1e6:.0f}M total params{detail}.",
        "  per CPU  |  per GPU |   Options",
        *(f"{cpu / 2**30:8.2f}GB | {gpu / 2**30:6.2f}GB | {options}" for cpu, gpu, options in rows),
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
            needs = estimate_zero3_model_states_mem_needs(*sizes, optimizer, params, whole, additional_buffer_factor)
            options = f"offload_param={devices[0]:<4}, offload_optimizer={devices[1]:<4}, zero_init={int(whole)}"
            rows.append((*needs[:2], options))
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
    sizes = (total_params, num_gpus_per_node, num_nodes)
    needs = [estimate_zero2_model_states_mem_needs(*sizes, cpu, additional_buffer_factor) for cpu in (True, False)]
    rows = [(*need, f"offload_optimizer={place}") for need, place in zip(needs, ("cpu", "none"), strict=True)]
    _write_table(total_params, "", num_gpus_per_node, num_nodes, rows)


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Write the table for a model object to standard output."""
    sizes = (model_size(model)[0], num_gpus_per_node, num_nodes)
    estimate_zero2_model_states_mem_needs_all_cold(*sizes, additional_buffer_factor)
