"""The one table of configuration keys: path -> what it means and what this release does with it.

Paths are the canonical ones of the file format; ``<name>`` stands for a key of the user's choice, ``[]`` for a list element.
Type, default and range live in the models; a test proves that both lists of paths are the same.
"""

from collections.abc import Mapping
from types import MappingProxyType

from deepspeed.config.support import Key
from deepspeed.config.table_services import SERVICES
from deepspeed.config.table_training import TRAINING

KEYS: Mapping[str, Key] = MappingProxyType({**TRAINING, **SERVICES})

# Keys of this package that the reference format does not have.
EXTENSIONS = frozenset(
    {
        "checkpoint.allow_pickle",
        "checkpoint.async",
        "checkpoint.client_files",
        "checkpoint.keep_last",
        "checkpoint.rate_limit",
        "checkpoint.restore_data",
        "checkpoint.restore_rng",
        "memory.device_limit",
        "memory.host_limit",
        "seed",
        "zero_optimization.divergence",
        "zero_optimization.mics_hierarchical_params_gather",
        "zero_optimization.mics_shard_size",
    }
)
