"""The import path that other projects use for the launcher (``deepspeed.launcher.runner``)."""

import os
from collections.abc import Mapping, Sequence

from deepspeed.launcher.cli import main, parse_args
from deepspeed.launcher.environment import EXPORT_ENVS, environment_file_name
from deepspeed.launcher.hostfile import DEFAULT_HOSTFILE, filter_hosts, load_hostfile
from deepspeed.launcher.job import encode_world as encode_world_info
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
# Programs append the lines KEY=VALUE that they want on all hosts to the file of this name.
DEEPSPEED_ENVIRONMENT_NAME = environment_file_name(os.environ)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return host -> slot count, or None (with a warning) when there is no such file."""
    if os.path.isfile(hostfile_path):
        return load_hostfile(hostfile_path)
    logger.warning("hostfile %s does not exist; only the local machine is used", hostfile_path)
    return None


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Apply one filter to host -> slot list."""
    return filter_hosts(host_info, include=include_str, exclude=exclude_str)


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Apply one filter to host -> slot count and return host -> chosen slots."""
    return filter_hosts(
        {host: range(count) for host, count in resource_pool.items()}, include=inclusion, exclude=exclusion
    )


if __name__ == "__main__":
    main()
