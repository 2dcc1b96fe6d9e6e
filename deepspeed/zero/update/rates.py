"""How fast this machine updates at home and moves states: what decides how much of an update is the device's."""

import time

import torch

from deepspeed.comm import collectives
from deepspeed.device import get_accelerator
from deepspeed.mesh.groups import Mesh
from deepspeed.optim import host
from deepspeed.optim.base import slot_bytes
from deepspeed.tier.arena import Arena
from deepspeed.zero.update.shares import Rates, slowest

_NUMEL = 1 << 22
_ROUNDS = 4


def measured_share(base: torch.optim.Optimizer, mesh: Mesh, device: torch.device) -> float:
    """Of the update the share for which the device's part, whose states travel, takes as long as the host's: measured
    here, with the slowest rank's rates. 0 where the device is the host. Collective.
    """
    if device.type == "cpu":
        return 0.0
    rates = collectives.gather_objects(_measure(slot_bytes(base) + 4, device), mesh.job)
    return slowest(rates).device_share()


def _measure(nbytes: int, device: torch.device) -> Rates:
    """With ``nbytes`` of weight and slots an element."""
    numel, arena = _NUMEL, Arena(pins=True, keep=False)
    pinned = arena.empty(numel * 4, pin=True)
    abroad = torch.empty_like(pinned, device=device)
    floats = [torch.zeros(numel, device="cpu") for _ in range(nbytes // 4)]
    grad, out = torch.zeros(numel, device="cpu"), torch.zeros(numel, dtype=torch.bfloat16, device="cpu")

    def update() -> None:
        """About what any rule reads and writes."""
        if len(floats) == 3 and host.usable(host.CPU_ADAM, *floats):
            host.adam_step(
                floats[0], grad, *floats[1:], step=1, lr=0.0, betas=(0.9, 0.99), eps=1.0, weight_decay=0.0, out=out
            )
            return
        for tensor in floats:
            tensor.add_(grad)
        out.copy_(floats[0])

    times = []
    for action in (update, lambda: abroad.copy_(pinned), lambda: pinned.copy_(abroad)):
        best = float("inf")
        for _ in range(_ROUNDS):
            get_accelerator().synchronize()
            begin = time.perf_counter()
            action()
            get_accelerator().synchronize()
            best = min(best, time.perf_counter() - begin)
        times.append(best / numel)
    return Rates(times[0], times[1] * nbytes / 4, times[2] * nbytes / 4)
