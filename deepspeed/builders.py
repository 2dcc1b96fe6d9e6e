"""Names of the kernel builders. This release has no native kernels: builders can be asked whether they fit, and say no."""

from types import MappingProxyType
from typing import Any, NoReturn

from deepspeed.pending import raise_not_yet


class OpBuilder:
    """Builder of one kernel extension."""

    NAME = ""
    BUILD_VAR = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """False: nothing can be built."""
        return False

    def load(self, verbose: bool = False) -> Any:
        """Raise NotYetError."""
        return self._refuse()

    def jit_load(self, verbose: bool = True) -> Any:
        """Raise NotYetError."""
        return self._refuse()

    def builder(self) -> Any:
        """Raise NotYetError."""
        return self._refuse()

    def _refuse(self) -> NoReturn:
        raise_not_yet(f"the native kernel {self.name!r}", "Optimizers run on torch's own implementations.")


class AsyncIOBuilder(OpBuilder):
    """Asynchronous file IO."""

    NAME, BUILD_VAR = "async_io", "DS_BUILD_AIO"


class GDSBuilder(OpBuilder):
    """GPU direct storage."""

    NAME, BUILD_VAR = "gds", "DS_BUILD_GDS"


class CPUAdamBuilder(OpBuilder):
    """Adam on host memory."""

    NAME, BUILD_VAR = "cpu_adam", "DS_BUILD_CPU_ADAM"


class FusedAdamBuilder(OpBuilder):
    """Adam on the device."""

    NAME, BUILD_VAR = "fused_adam", "DS_BUILD_FUSED_ADAM"


_BUILDERS = (AsyncIOBuilder, GDSBuilder, CPUAdamBuilder, FusedAdamBuilder)
compatible_ops = MappingProxyType({builder.NAME: False for builder in _BUILDERS})
installed_ops = MappingProxyType({builder.NAME: False for builder in _BUILDERS})
