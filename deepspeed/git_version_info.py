"""What this installation was built from and with."""

from importlib.util import find_spec

import torch

from deepspeed.accelerator.native.builders import compatible_ops, installed_ops
from deepspeed.version import __version__ as version

git_hash = git_branch = None
# What is compiled at install time depends on no torch: the accelerator is what this torch was built for.
accelerator_name = "cuda" if torch.version.cuda or torch.version.hip else "cpu"
HAS_TRITON = find_spec("triton") is not None
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": ".".join((torch.version.cuda or "0.0").split(".")[:2]),
    "nccl_version": "0.0",
    "hip_version": ".".join((torch.version.hip or "0.0").split(".")[:2]),
}

__all__ = ["HAS_TRITON", "accelerator_name", "compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info"]
__all__ += ["version"]
