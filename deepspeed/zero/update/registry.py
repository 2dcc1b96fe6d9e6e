"""The policies of the update that are here, found by their files, and the one that an engine has."""

import functools
import importlib
import pkgutil
from types import ModuleType

import torch

from deepspeed.config import DeepSpeedConfig
from deepspeed.zero import update
from deepspeed.zero.memory.tiers import Tiers
from deepspeed.zero.optim_view import OptimView
from deepspeed.zero.plan import AT_ONCE, StateKind, UpdateSettings
from deepspeed.zero.update.inline import BackgroundUpdate
from deepspeed.zero.update.policy import UpdateHost, UpdatePolicy
from deepspeed.zero.update.tiled import TiledUpdate


@functools.cache
def policies() -> tuple[ModuleType, ...]:
    """Import the modules beside this one that have settings: ``settings_of(config)`` and ``policy_of(...)``."""
    names = sorted(module.name for module in pkgutil.iter_modules(update.__path__))
    modules = [importlib.import_module(f"{update.__name__}.{name}") for name in names if name != "registry"]
    return tuple(module for module in modules if hasattr(module, "settings_of"))


def settings_of(config: DeepSpeedConfig) -> UpdateSettings:
    """Return the settings of the policy that ``config`` asks for; the configuration's rules allow one at a time."""
    asked = (module.settings_of(config) for module in policies())
    return next((settings for settings in asked if settings is not None), AT_ONCE)


def build_policy(
    host: UpdateHost, optimizer: torch.optim.Optimizer, views: list[OptimView], settings: UpdateSettings, tiers: Tiers
) -> UpdatePolicy:
    """Return the policy of an engine with ``settings``, over ``views``."""
    for module in policies():
        if type(settings).__module__.startswith(module.__name__):
            policy: UpdatePolicy = module.policy_of(host, optimizer, settings, tiers)
            return policy
    # Also where no element on a drive is this rank's: the ranks tell each other how their tiles went.
    if any(unit.on_drive(StateKind.OPTIM) for unit in host.units):
        return TiledUpdate(host, optimizer, [view for view in views if view.on_drive], tiers.optim_drive().staging)
    return BackgroundUpdate(host, optimizer)
