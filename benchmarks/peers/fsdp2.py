"""torch FSDP2: a group per block and one for the root, bf16 compute over fp32 shards, built on meta: no rank ever holds
the model.
"""

import argparse

import torch
from measure import Step, run
from models import ADAMW, Workload, build_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def build(args: argparse.Namespace, workload: Workload) -> Step:
    """Variants: default (fused AdamW, bf16 reductions), foreach (foreach AdamW), fp32_reduce (gradients reduced in
    fp32), compiled (each block by inductor, as torchtitan does), compiled_model (the whole model, graphs end at hooks).
    """
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
