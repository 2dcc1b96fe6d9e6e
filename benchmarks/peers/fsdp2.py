"""torch FSDP2: a group per block and one for the root, bf16 compute over fp32 shards, built on meta: no rank ever holds
the model. Or, in fp32, ``parallelize_module`` beside it.
"""

import argparse

import torch
from measure import Step, run
from models import ADAMW, CUTS, GPT, Cut, Workload, build_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def split_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallelism as this project's plan has it: the same layers, the vocabulary too, whole logits."""
    ways = mesh.size()
    for block in model.blocks:
        for param in block.qkv.parameters():  # each rank's rows of q, k and v follow each other, as a shard is cut
            parts = [part.chunk(ways) for part in param.data.chunk(3)]
            param.data = torch.cat([part[rank] for rank in range(ways) for part in parts])
        columns, rows = ("qkv", "up"), ("project", "down")
        plan = {**dict.fromkeys(columns, ColwiseParallel()), **dict.fromkeys(rows, RowwiseParallel())}
        parallelize_module(block, mesh, plan)
    ends = {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, ends)


def build_split(cut: Cut, workload: Workload) -> GPT:
    """Two axes, as ``parallelize_module`` and ``fully_shard`` share them; fp32, of the same values as all others."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // cut.tp, cut.tp), mesh_dim_names=("dp", "tp"))
    model = build_model(workload)
    split_layers(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def build_whole(args: argparse.Namespace, workload: Workload) -> GPT:
    """Data parallel only; bf16 compute over fp32 shards."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    reduce_dtype = torch.float32 if args.variant == "fp32_reduce" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    with torch.device("meta"):
        model = build_model(workload)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in {"compiled": [*model.blocks], "compiled_model": [model]}.get(args.variant, []):
        module.compile()
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def build(args: argparse.Namespace, workload: Workload) -> Step:
    """Variants: default (fused AdamW, bf16 reductions), foreach (foreach AdamW), fp32_reduce (gradients reduced in
    fp32), compiled (each block by inductor, as torchtitan does), compiled_model (the whole model, graphs end at hooks),
    tp2 (two ranks share each layer; fp32).
    """
    cut = CUTS.get(args.variant)
    model = build_whole(args, workload) if cut is None else build_split(cut, workload)
    choice = {"foreach": True} if args.variant == "foreach" else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, **choice)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    run("fsdp2", build, framework=f"torch {torch.__version__}")
