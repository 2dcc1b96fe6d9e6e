"""One rank of benchmarks/experts.py, by whatever package ``deepspeed`` is: seconds of a step of layers of experts."""

import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer


class Expert(nn.Module):
    """A feed-forward network."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many numbers a token as came."""
        return self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """Layers of experts with a residual each."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        options = {"num_experts": case["experts"], "ep_size": case["ep"], "k": case["k"], "capacity_factor": 1.25}
        width = case["width"]
        layers = (MoE(width, Expert(width, case["inner"]), **options) for _ in range(case["layers"]))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss of ``x`` [batch, length, width]."""
        extra = x.new_zeros(())
        for layer in self.layers:
            out, auxiliary, _ = layer(x)
            x, extra = x + out, extra + auxiliary
        return x.square().mean() + 0.01 * extra


def main() -> None:
    """Print a line of JSON from the first rank."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": case["batch"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": case["stage"]},
    }
    model = Model(case)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(case["batch"], case["length"], case["width"], generator=generator)
    seconds, busy, losses = [], [], []
    for _ in range(case["steps"]):
        dist.barrier()
        begun, used = time.perf_counter(), time.process_time()
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        busy.append(time.process_time() - used)
        losses.append(float(loss.detach()))
    if dist.get_rank() == 0:
        found = {"step_s": statistics.median(seconds[3:]), "cpu_s": statistics.median(busy[3:])}
        print(json.dumps({**found, "losses": [losses[0], losses[-1]], "package": deepspeed.__file__}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
