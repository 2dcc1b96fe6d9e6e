"""Public communication module: the calls of ``torch.distributed``, start-up and the communication log."""

from importlib import import_module
from typing import Any

from deepspeed.client.attrs import loads_names


def _names() -> dict[str, Any]:
    calls, log = (import_module(f"deepspeed.client.comm.{name}") for name in ("calls", "comms_log"))
    start = dict.fromkeys(("init_distributed", "mpi_discovery"), "deepspeed.comm.init")
    return calls.CALLS | log.LOG_CALLS | calls.BESIDE | start | {"comms_logger": log.LOG}


__getattr__ = loads_names(__name__, _names)
