"""Whether the model is still the one that ``initialize`` was given: a change is right, or refused by name."""

from operator import is_
from typing import Any

import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.monitor.log import logger
from deepspeed.zero.plan import StateKind
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.unit import Unit

_REMEDY = "change the model before deepspeed.initialize, or call engine.destroy(), change it, and initialize again"
_DATA_EVERY = 100  # updates between two looks for what forwards write through ``data``


class ModuleTree:
    """Record of the modules and parameters of ``model`` at construction."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self._model, self._runtime, units = model, runtime, runtime.units
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._ours = {p: s.name for u in units for p, s in zip(u.params, u.layout.segments, strict=True)}
        self._added: dict[str, nn.Parameter] = {}
        self._dropped: set[str] = set()
        # Whole parameters beside masters of their own; torch counts what is written in place, but not through ``data``.
        self._apart = [u for u in units if not u.movable and u.master is not None and not u.master_is_param]
        self._versions = {u: [p._version for p in u.params] for u in units}
        self._through_data: set[Unit] = set()  # found to be written so, which is looked for in each forward since
        self._untrained = {u: _version_of(u) for u in self._apart if not u.drives}
        self._look()

    def _look(self) -> None:
        parts = [part for m in self._model.modules() for part in (m._modules, m._parameters)]
        self._seen: list[tuple[dict[str, Any], tuple[Any, ...]]] = [(part, (*part.values(),)) for part in parts]

    def check(self) -> None:
        """Raise UsageError for a trained parameter that is new or another; warn of new frozen and of removed ones."""
        for part, was in self._seen:
            if len(part) != len(was) or not all(map(is_, part.values(), was)):
                self._compare(dict(self._model.named_parameters(remove_duplicate=False)))
                self._look()
                break
        for name, param in self._added.items():
            if param.requires_grad:
                raise UsageError(
                    f"parameter {name!r} was added after deepspeed.initialize and requires a gradient, but the "
                    f"engine's optimizer would never update it: {_REMEDY}. requires_grad_(False) keeps it as it is"
                )

    def _compare(self, now: dict[str, nn.Parameter]) -> None:
        for name, param in now.items():
            before = self._names.get(name)
            if before is None or before is param:
                continue
            if (other := self._ours.get(param)) is not None:
                raise UsageError(f"parameter {name!r} was tied to {other!r} after deepspeed.initialize: {_REMEDY}")
            raise UsageError(
                f"parameter {name!r} was replaced by another object after deepspeed.initialize (another head, resized "
                "embeddings, load_state_dict(assign=True)?), and the engine's optimizer and checkpoints know the old "
                f"one: {_REMEDY}. To change values alone copy them in place"
            )
        added = {n: p for n, p in now.items() if n not in self._names and p not in self._ours}
        if news := [n for n, p in added.items() if n not in self._added and not p.requires_grad]:
            logger.warning(
                "%d parameters were added after deepspeed.initialize and are frozen (%s, ...): every rank has its own, "
                "whole, and engine.save_checkpoint leaves them out",
                len(news),
                news[0],
            )
        self._added, present = added, set(now.values())
        if gone := [n for p, n in self._ours.items() if p not in present and n not in self._dropped]:
            self._dropped.update(gone)
            logger.warning(
                "%d parameters are no longer in the model (%s, ...): they train no more, and stay in memory, optimizer "
                "and checkpoints until engine.destroy()",
                len(gone),
                gone[0],
            )

    def take_writes(self, units: list[Unit]) -> None:
        """Keep what the ending forward has written to sharded ``units``: every rank has written the same and keeps its
        part, in masters too. Writes inside a client's context are kept at the end of that.

        Writes through ``data``, which torch does not count, are looked for up to the third update and behind every
        hundredth: to read all parameters in each forward would cost a part of it.
        """
        steps = self._runtime.steps
        sampled = steps < 3 or steps % _DATA_EVERY == 0
        for unit in units:
            if not unit.movable or not unit.whole or (unit.pins and not self._runtime.in_one_pass):
                continue
            now, before = [p._version for p in unit.params], self._versions[unit]
            self._versions[unit] = now
            counted = unit.buffer.bring_back() or now != before
            looked = unit in self._through_data or (sampled and not unit.on_drive(StateKind.PARAM))
            written = _written(unit) if counted or looked else []
            names = [unit.layout.segments[position].name for position in written]
            if names and not counted:
                if unit not in self._through_data and steps > 2:
                    raise UsageError(
                        f"parameter {names[0]!r} was written through .data in a forward, which torch does not count, "
                        "so earlier values may be lost: use param.copy_(...) under torch.no_grad(), without .data"
                    )
                self._through_data.add(unit)
            if names and self._runtime.update.refuses_writes and unit.master is not None:
                raise UsageError(_refused(names[0]))
            for position in written:
                unit.absorb(position)

    def take_edits(self, *, unseen: bool = False) -> None:
        """Update masters from client writes to parameters (``load_state_dict``, ``apply``), which the next update would
        undo. Element by element: a master that rounds to its parameter's value keeps its bits.

        Writes through ``data``, which torch does not count, are looked for until the first update, when programs
        initialise their weights, and with ``unseen``: to read all of them for each update would cost a part of it.
        """
        first = self._runtime.steps == 0
        for unit in self._apart:
            now, before = [p._version for p in unit.params], self._versions[unit]
            edited = [i for i, version in enumerate(now) if version not in (before[i], unit.absorbed.get(i))]
            # masters that somebody has written to are ahead of what is shown, until the update
            if (alone := first and self._untrained.get(unit) == _version_of(unit)) or unseen:
                edited = [*range(len(unit.params))]
            if edited and self._runtime.update.refuses_writes and not first:
                self._versions[unit] = now  # refused once: what is said to use works then
                raise UsageError(_refused(unit.layout.segments[edited[0]].name))
            for position in edited:
                unit.absorb(position)
            self._versions[unit] = now
            if alone:  # what was written now is of the parameters, and further writes to those count, too
                self._untrained[unit] = _version_of(unit)


def _refused(name: str) -> str:
    return (
        f"parameter {name!r} was written in place under delayed_update or zenflow, whose masters are ahead of it: use "
        "engine.load_module_state_dict or safe_set_full_fp32_param"
    )


def _written(unit: Unit) -> list[int]:
    """Return positions of parameters of which this rank's part differs, bit by bit, from its value at rest."""
    shown = unit.buffer.full[slice(*unit.range_of(StateKind.PARAM))]
    with unit.values(StateKind.PARAM) as resting:
        both = [[unit.part(StateKind.PARAM, s, flat) for flat in (shown, resting)] for s in unit.layout.segments]
        bits = [(a.view(torch.uint8), b.to(a.device).view(torch.uint8)) for a, b in both]
        return [position for position, (a, b) in enumerate(bits) if not torch.equal(a, b)]


def _version_of(unit: Unit) -> int:
    """Return torch's version count of the masters; -1 without any."""
    return -1 if unit.master is None else unit.master._version
