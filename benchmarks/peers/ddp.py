"""torch DistributedDataParallel: fp32 weights on every rank, bf16 compute by autocast, gradients as views of the
buckets.
"""

import argparse

import torch
from measure import Step, run
from models import ADAMW, Workload, build_model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def build(args: argparse.Namespace, workload: Workload) -> Step:
    """Variants: default (autocast, fp32 all-reduce; the bf16 hook needs NCCL), pure_bf16 (weights, gradients and Adam
    all in bf16).
    """
    model = build_model(workload)
    if args.variant == "pure_bf16":
        model.to(torch.bfloat16)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.variant != "pure_bf16"):
            loss = parallel(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    run("ddp", build, framework=f"torch {torch.__version__}")
