"""What a pickle, or a copy, of a module that an engine drives has: what the plain module would have."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from deepspeed.zero.param import parts_refusal

_REDUCE = "__reduce_ex__"  # pickle and copy ask the object for it, before its class


def pickle_plainly(module: nn.Module, hooks: Any) -> None:
    """Pickle and copy ``module``, from now on, without the forward hooks of ``hooks``, a ``ModuleHooks``."""
    vars(module)[_REDUCE] = functools.partial(_pickled, weakref.ref(module), weakref.ref(hooks))


def pickle_as_before(modules: Iterable[nn.Module]) -> None:
    """End ``pickle_plainly`` for ``modules``."""
    for module in modules:
        vars(module).pop(_REDUCE, None)


def _pickled(reference: Callable[[], Any], hooks: Callable[[], Any], protocol: Any) -> Any:
    """Return the values that rebuild the module. UsageError where it is in parts over ranks."""
    module, owner = reference(), hooks()
    mesh = owner.mesh if owner is not None else None
    if mesh is not None and max(mesh.tp.size, mesh.pp.size) > 1:
        raise parts_refusal(type(module).__name__)
    kind: Any = type(module)
    made = kind.__reduce_ex__(module, protocol)
    if len(made) < 3 or not isinstance(made[2], dict):
        return made
    ours = {handle.id for handle in owner.forward_handles} if owner is not None else set()
    state = {name: value for name, value in made[2].items() if name != _REDUCE}
    for name in [name for name in state if name.startswith("_forward_")]:
        if isinstance(hooked := state[name], dict):
            state[name] = type(hooked)((key, value) for key, value in hooked.items() if key not in ours)
    return (*made[:2], state, *made[3:])
