"""What a script does with a package of the ``deepspeed`` interface; ``ours`` and ``reference`` share it, so both run
the same calls.
"""

import argparse
import contextlib
import os
import tempfile
from types import ModuleType
from typing import Any

from measure import Step
from models import ADAMW, CUTS, Part, Workload, build_model, token_loss
from torch import Tensor

VARIANTS = ("default", "compiled", "torch_adam", "no_init", "cpu", "nvme", "nvme_no_init", *CUTS)

PLAN = {
    "layer_specs": [
        {"patterns": [r".*\.qkv\.weight"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": [r".*\.up\.weight"], "partition_type": "column"},
        {"patterns": [r".*\.(project|down)\.weight"], "partition_type": "row"},
    ],
    "lm_head_patterns": ["head"],
}
"""How the GPT is split among tensor-parallel ranks."""


def config_for(args: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """bf16 + AdamW, no clipping, one micro-batch a step.

    Variants: compiled (``engine.compile()``), torch_adam (torch's AdamW), no_init (whole model, then sharded), cpu and
    nvme (parameters and optimizer state offloaded; nvme to the folder DS_BENCH_NVME, default the system's folder for
    temporary files), pp2 and tp2 (two pipeline stages, or two ranks that share each layer; fp32).
    """
    if args.variant not in VARIANTS:
        raise SystemExit(f"unknown variant {args.variant!r}; known: {', '.join(VARIANTS)}")
    params: dict[str, Any] = {**ADAMW, "betas": list(ADAMW["betas"])}
    if args.variant == "torch_adam":
        params["torch_adam"] = True
    zero: dict[str, Any] = {"stage": args.level}
    tier = args.variant.removesuffix("_no_init")
    if tier in ("cpu", "nvme"):
        place = {"device": tier, "pin_memory": False}
        if tier == "nvme":
            place["nvme_path"] = os.environ.get("DS_BENCH_NVME", tempfile.gettempdir())
        if getattr(args, "prefetch", None) is not None:
            zero["stage3_prefetch_bucket_size"] = args.prefetch
        # The reference needs a buffer as large as the largest parameter for every one in flight.
        drive = {"max_in_cpu": 0, "buffer_count": 64, "buffer_size": 25_000_000}
        zero |= {"offload_optimizer": place, "offload_param": {**place, **drive} if tier == "nvme" else place}
    cut = CUTS.get(args.variant)
    config = {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": cut is None},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": params},
    }
    if cut is not None:
        micro = cut.micro or workload.micro_batch
        config |= {"train_micro_batch_size_per_gpu": micro}
        config |= {"gradient_accumulation_steps": workload.micro_batch // micro}
        config |= {"tensor_parallel": {"autotp_size": cut.tp, "partition_config": PLAN}} if cut.tp > 1 else {}
    return config


def build_pipeline_step(package: ModuleType, args: argparse.Namespace, workload: Workload) -> Step:
    """The step of a pipeline engine: one ``train_batch`` of all micro-batches."""
    cut, config = CUTS[args.variant], config_for(args, workload)
    layers = [package.pipe.LayerSpec(Part, workload, index) for index in range(workload.model.layers + 2)]
    model = package.pipe.PipelineModule(
        layers, num_stages=cut.pp, loss_fn=token_loss, partition_method="parameters", activation_checkpoint_interval=0
    )
    engine, _, _, _ = package.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        return engine.train_batch(zip(inputs.split(cut.micro), targets.split(cut.micro), strict=True)).detach()

    return step


def build_step(package: ModuleType, args: argparse.Namespace, workload: Workload) -> Step:
    """The step of an engine made by ``package.initialize``; at level 3 the model is constructed sharded."""
    if CUTS.get(args.variant) is not None and CUTS[args.variant].pp > 1:
        return build_pipeline_step(package, args, workload)
    config = config_for(args, workload)
    sharded = args.level == 3 and not args.variant.endswith("no_init")
    with package.zero.Init(config_dict_or_path=config) if sharded else contextlib.nullcontext():
        model = build_model(workload)
    engine, _, _, _ = package.initialize(model=model, model_parameters=model.parameters(), config=config)
    if args.variant == "compiled":
        engine.compile()

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def init_group(package: ModuleType) -> None:
    """The process group, made by the package, so that the memory base is taken after it."""
    package.init_distributed(dist_backend="gloo")
