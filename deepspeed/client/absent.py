"""Modules of DeepSpeed that this package has not: importing one says so, and what to use instead."""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

# Name below ``deepspeed`` -> what to use instead; docs/migrating.md shows the same.
INSTEAD = {
    **dict.fromkeys(
        [f"compile.passes.{name}" for name in ("offload_adam_states", "prefetch", "selective_gather", "zero3_compile")],
        "engine.compile(backend=...) takes every backend of torch.compile",
    ),
    "compression": "quantize and prune the model before deepspeed.initialize, with torchao for example",
    "inference": "hand the weights to an inference server (engine.save_16bit_model)",
    "io": "engine.save_checkpoint writes in parallel, and behind the program with checkpoint.async",
    "launcher.multinode_runner": "the command deepspeed with --launcher starts ranks on several machines",
    "linear": "adapters of PEFT train under every stage, and frozen weights are sharded as others are",
    "module_inject.replace_policy": "torch.compile and scaled_dot_product_attention",
    "ops.sparse_attention": "torch.nn.attention.flex_attention takes masks of blocks",
    "runtime.checkpoint_engine": "engine.save_checkpoint; checkpoint.async saves behind the program",
    "runtime.data_pipeline": "a dataset, collate_fn or data_sampler of your own decides what comes when",
    "runtime.domino": "the block tensor_parallel splits layers, whose sums travel beside the backward",
    "runtime.swap_tensor": "drives belong to the engine: offload_optimizer and offload_param with device nvme",
    "runtime.torch_autocast": "autocast belongs to the engine: the block torch_autocast",
    "runtime.zenflow": "the block zero_optimization.zenflow updates chosen columns at once and the rest later",
}


class AbsentModules(MetaPathFinder):
    """Finder for absent modules; it is asked after all others, so only about modules that do not exist."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Raise ModuleNotFoundError with the sentence for a name in ``INSTEAD`` or below; None for all others."""
        name = fullname.removeprefix("deepspeed.")
        for absent, instead in INSTEAD.items() if name != fullname else ():
            if name == absent or name.startswith(f"{absent}."):
                text = f"{fullname} of DeepSpeed is not part of this package. Instead: {instead}."
                raise ModuleNotFoundError(text, name=fullname)


def tell_of_absent_modules() -> None:
    """Register the finder with the import system, once in a process."""
    if not any(isinstance(finder, AbsentModules) for finder in sys.meta_path):
        sys.meta_path.append(AbsentModules())
