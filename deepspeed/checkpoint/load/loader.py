"""Loading as all ranks see it: they open the same folder, compare, read, and a failure of one is told to all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.agree import in_no_model, together
from deepspeed.checkpoint.foreign.legacy import ReferenceSource
from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.load import restore
from deepspeed.checkpoint.load.opening import open_checkpoint
from deepspeed.checkpoint.load.own import OwnSource
from deepspeed.checkpoint.load.restore import Comparison, LoadRules
from deepspeed.checkpoint.load.source import Source, whole
from deepspeed.checkpoint.rng import restore_rng
from deepspeed.checkpoint.save.collect import States, extra_modules, view_key
from deepspeed.checkpoint.save.saver import progress
from deepspeed.errors import CheckpointError
from deepspeed.mesh.groups import Mesh
from deepspeed.observe.log import logger
from deepspeed.zero.gradients import Gradients
from deepspeed.zero.runtime import Runtime


def open_everywhere(mesh: Mesh, load_dir: Path, tag: str | None, *, allow_pickle: bool) -> Source | None:
    """The checkpoint on every rank, or an error on every rank; None when there is none. Collective."""
    with together(mesh, f"loading from {load_dir}") as shared:
        found = folders.find_checkpoint(load_dir, tag) if mesh.first else None
        shared.mine = None if found is None else found.name
    name = shared.all[0]
    if name is None:
        return None
    with together(mesh, f"loading {load_dir / name}"):
        source = open_checkpoint(load_dir / name, rank=mesh.job.index, allow_pickle=allow_pickle)
    return source


class Loaded:
    """A checkpoint whose tensors are in the engine; the rest is still to be taken."""

    def __init__(self, states: States, source: Source, found: Comparison) -> None:
        self._states, self._source, self._found = states, source, found
        self.facts = source.facts

    def client_state(self) -> dict[str, Any]:
        """The user's keys, and what DeepSpeed's loader leaves among them."""
        facts, entries = self.facts, self._source.entries
        world = facts.get("world") or {}
        own = {
            "buffer_names": [n for s, n in entries if s == "buffer"],
            "param_shapes": [{n: torch.Size(d.shape) for (s, n), d in entries.items() if s == "master"}],
            "frozen_param_shapes": {n: torch.Size(d.shape) for (s, n), d in entries.items() if s == "param"},
            "shared_params": dict(facts.get("shared") or {}),
            "global_samples": (facts.get("engine") or {}).get("global_samples", 0),
            "ds_config": facts.get("config"),
            "ds_version": (facts.get("saved") or {}).get("deepspeed"),
            "checkpoint_parallel_dimensions": {"pp_degree": world.get("pp", 1), "tp_degree": world.get("tp", 1)},
        }
        return {**own, **(facts.get("client_state") or {})}

    def restore_rng(self) -> None:
        """This rank's generators, when there was such a rank."""
        rng = self._of_rank("rng")
        if rng is not None:
            restore_rng(rng)

    def data_position(self) -> Any:
        """This rank's position in the data; the first rank's after a change of their number."""
        mesh, world = self._states.mesh, self.facts.get("world") or {}
        same = int(world.get("size", 0)) == mesh.job.size and int(world.get("data", mesh.job.size)) == mesh.data.size
        return self._of_rank("data") if same else self._of_rank("data", rank=0)

    def _of_rank(self, name: str, rank: int | None = None) -> Any:
        if not isinstance(self._source, OwnSource):
            return None
        return self._source.rank_fact(self._states.mesh.job.index if rank is None else rank, name)

    def fill_gradients(self, gradients: Gradients, *, factor: float) -> None:
        """The open accumulation window."""
        restore.fill_gradients(self._states, self._source, gradients, factor=factor)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every weight and buffer, whole."""
        found = {n: whole(self._source, (s, n)) for s, n in self._source.entries if s in ("master", "param", "buffer")}
        return found | {alias: found[name] for alias, name in (self.facts.get("shared") or {}).items() if name in found}


def load_into(
    states: States,
    runtime: Runtime,
    source: Source,
    rules: LoadRules,
    mesh: Mesh,
    *,
    check: Callable[[], None],
    begin: Callable[[], None],
) -> Loaded:
    """Weights, buffers and optimizer state. Collective; an error on one rank is raised on all.

    ``check`` may refuse the checkpoint too; ``begin`` is called when everything fits: until then nothing has changed.
    """
    if isinstance(source, ReferenceSource):
        source = source.with_groups(states.groups)  # some of its files have numbers instead of names
    with together(mesh, f"loading {source.path}") as shared:
        found = restore.compare(states, source, rules)
        shared.mine = found.extra
    found.extra = in_no_model(shared.all)
    with together(mesh, f"loading {source.path}"):
        for line in restore.verdict(found, str(source.path), strict=rules.strict):
            logger.warning("loading %s: %s", source.path, line)
        if rules.optimizer:
            restore.check_optimizer(states, source)
        check()
    begin()
    with (
        together(mesh, f"loading {source.path}"),
        progress(f"loading {source.path.name}", _nbytes(states), show=mesh.first) as told,
    ):
        _fill(states, source, found, rules, told)
    runtime.publish(runtime.units)
    return Loaded(states, source, found)


def _fill(states: States, source: Source, found: Comparison, rules: LoadRules, told: Callable[[int], None]) -> None:
    if rules.module:
        restore.fill_weights(states, source, found, told)
        restore.fill_buffers(states, source, found)
        _fill_extra(states, source)
    if rules.optimizer:
        restore.restore_groups(states, [g["options"] for g in source.facts["optimizer"].get("groups", [])])
        restore.fill_optimizer(states, source, found, told)
        _fill_odd(states, source)


def _fill_extra(states: States, source: Source) -> None:
    saved = source.facts.get("extra_state") or {}
    for path, module in extra_modules(states.module).items():
        if path in saved:
            module.set_extra_state(saved[path])


def _fill_odd(states: States, source: Source) -> None:
    """What the optimizer keeps besides tensors and numbers."""
    if not isinstance(source, OwnSource) or states.optimizer is None:
        return
    odd = source.rank_fact(states.mesh.job.index, "odd") or source.rank_fact(0, "odd") or {}
    states.optimizer.state.update(odd.get("shared", {}))
    wanted = {view_key(v): v for v in states.views}
    for key, values in odd.get("views", {}).items():
        if key not in wanted:
            raise CheckpointError(
                f"optimizer state {', '.join(values)} is neither a tensor nor a number and belongs to the "
                "layout it was saved under; load "
                "with the same configuration and number of ranks, or with load_optimizer_states=False"
            )
        states.optimizer.state[wanted[key].param].update(values)


def _nbytes(states: States) -> int:
    return sum(u.shard.numel() * u.full.element_size() for u in states.units)
