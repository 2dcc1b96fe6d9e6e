"""ZenFlow: see ``policy``."""

from typing import Any

from deepspeed.zero.memory.tiers import Tiers
from deepspeed.zero.update.policy import UpdateHost
from deepspeed.zero.update.selective.policy import SelectiveUpdate
from deepspeed.zero.update.selective.settings import ColumnsPlan, settings_of

__all__ = ["policy_of", "settings_of"]


def policy_of(host: UpdateHost, optimizer: Any, settings: ColumnsPlan, tiers: Tiers) -> SelectiveUpdate:
    """Return the policy of an engine with these settings."""
    return SelectiveUpdate(host, optimizer, settings)
