"""Public communication module: the calls of ``torch.distributed``, start-up and the communication log."""

from typing import TYPE_CHECKING, Any

from torch.distributed import ReduceOp

from deepspeed.client.comm.calls import CALLS
from deepspeed.client.comm.log import LOG as comms_logger, LOG_CALLS
from deepspeed.comm.init import init_distributed, mpi_discovery
from deepspeed.errors import pending_class

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


TorchBackend = pending_class("deepspeed.comm.TorchBackend", "The calls are functions of deepspeed.comm.")
globals().update(CALLS | LOG_CALLS)
__all__ = [*CALLS, *LOG_CALLS, "ReduceOp", "comms_logger", "init_distributed", "mpi_discovery"]
