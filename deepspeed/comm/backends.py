"""Which communication backends this build of torch has."""

import torch.distributed as dist

NAMES = ("gloo", "nccl", "xccl", "mpi", "ucc")


def available_backends() -> dict[str, bool]:
    """Backend name -> whether it can be used; all False where torch was built without ``torch.distributed``."""
    if not dist.is_available():
        return dict.fromkeys(NAMES, False)
    asks = {name: getattr(dist, f"is_{name}_available", None) for name in NAMES}
    return {name: bool(ask is not None and ask()) for name, ask in asks.items()}
