"""An accelerator of two devices that exists on paper only: which device is current, and who chose it."""

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.accelerator.device import Accelerator, set_accelerator


class TwoDevices(Accelerator):
    """Two CUDA devices without CUDA. ``chosen`` lists the calls of ``set_device``."""

    def __init__(self, *, current: int = 0, backend: str = "nccl") -> None:
        super().__init__("cuda")
        self.chosen: list[int] = []
        self._current = current
        self._communication_backend_name = backend

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self._current

    def set_device(self, device_index: int) -> None:
        self.chosen.append(device_index)
        self._current = device_index


@contextmanager
def two_devices(*, current: int = 0, backend: str = "nccl") -> Iterator[TwoDevices]:
    """Inside, this process has two devices."""
    accelerator = TwoDevices(current=current, backend=backend)
    set_accelerator(accelerator)
    try:
        yield accelerator
    finally:
        set_accelerator(None)
