"""The import path that other projects use for the launcher (``deepspeed.launcher.runner``)."""

import base64
import json
import os
from collections.abc import Mapping, Sequence

from deepspeed.launcher.cli import DEFAULT_HOSTFILE, main, parse_args
from deepspeed.launcher.hostfile import filter_hosts, read_hostfile
from deepspeed.observe.log import logger

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_resource_filter",
]

DLTS_HOSTFILE = DEFAULT_HOSTFILE
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")

# A list on purpose, although it is module state: clients append the prefixes they want forwarded to other nodes.
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"]


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return host -> slot count, or None (with a warning) when there is no such file."""
    hosts = read_hostfile(hostfile_path)
    if hosts is None:
        logger.warning("hostfile %s does not exist; only the local machine is used", hostfile_path)
    return hosts


def parse_resource_filter(host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = "") -> dict[str, list[int]]:
    """Apply one filter to host -> slot list; see :func:`deepspeed.launcher.hostfile.filter_hosts`."""
    return filter_hosts(host_info, include=include_str, exclude=exclude_str)


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Apply one filter to host -> slot count and return host -> chosen slots."""
    slots = {host: list(range(count)) for host, count in resource_pool.items()}
    return filter_hosts(slots, include=inclusion, exclude=exclusion)


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Return URL-safe base64 of the JSON of host -> device ids."""
    return base64.urlsafe_b64encode(json.dumps(dict(world_info)).encode()).decode()
