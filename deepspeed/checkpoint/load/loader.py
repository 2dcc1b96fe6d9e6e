"""Loading as all ranks see it: they open the same folder, compare, read, and a failure of one is told to all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.agree import in_no_model, together
from deepspeed.checkpoint.foreign.legacy import ReferenceSource
from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.load import restore
from deepspeed.checkpoint.load.match import WEIGHTS, Comparison, LoadRules, check_optimizer, compare, verdict
from deepspeed.checkpoint.load.reader import OwnSource, open_checkpoint
from deepspeed.checkpoint.load.source import Source, whole
from deepspeed.checkpoint.rng import restore_rng
from deepspeed.checkpoint.save.client_files import names_and_shapes
from deepspeed.checkpoint.save.collect import States, extra_modules, view_key
from deepspeed.checkpoint.save.writer import progress
from deepspeed.errors import CheckpointError
from deepspeed.mesh.groups import Mesh
from deepspeed.observe.log import logger
from deepspeed.zero.gradients import Gradients
from deepspeed.zero.runtime import Runtime


def open_everywhere(mesh: Mesh, load_dir: Path, tag: str | None, *, allow_pickle: bool) -> Source | None:
    """The checkpoint on every rank, or an error on every rank; None when there is none. Collective."""
    with together(mesh, f"loading from {load_dir}") as shared:
        folder = folders.find_checkpoint(load_dir, tag) if mesh.first else None
        shared.mine = None if folder is None else folder.name
    name = shared.all[0]
    if name is None:
        return None
    with together(mesh, f"loading {load_dir / name}"):
        source = open_checkpoint(load_dir / name, rank=mesh.job.index, allow_pickle=allow_pickle)
    return source


class Loaded:
    """A checkpoint whose tensors are in the engine; the rest is still to be taken."""

    def __init__(self, states: States, source: Source) -> None:
        self._states, self._source = states, source
        self.facts = source.facts

    def client_state(self) -> dict[str, Any]:
        """The user's keys, and what DeepSpeed's loader leaves among them."""
        facts, world = self.facts, self.facts.get("world") or {}
        ours = {
            **names_and_shapes(self._source.entries, facts.get("shared") or {}),
            "global_samples": (facts.get("engine") or {}).get("global_samples", 0),
            "ds_config": facts.get("config"),
            "ds_version": (facts.get("saved") or {}).get("deepspeed"),
            "checkpoint_parallel_dimensions": {"pp_degree": world.get("pp", 1), "tp_degree": world.get("tp", 1)},
        }
        return ours | (facts.get("client_state") or {})

    def restore_rng(self) -> None:
        """This rank's generators, when there was such a rank."""
        rng = _of_rank(self._source, self._states.mesh.job.index, "rng")
        if rng is not None:
            restore_rng(rng)

    def data_position(self) -> Any:
        """This rank's position in the data; the first rank's after a change of their number."""
        mesh, world = self._states.mesh, self.facts.get("world") or {}
        same = int(world.get("size", 0)) == mesh.job.size and int(world.get("data", mesh.job.size)) == mesh.data.size
        return _of_rank(self._source, mesh.job.index if same else 0, "data")

    def fill_gradients(self, gradients: Gradients, *, factor: float) -> None:
        """The open accumulation window."""
        restore.fill_gradients(self._states, self._source, gradients, factor=factor)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every weight and buffer, whole."""
        tensors = {n: whole(self._source, (s, n)) for s, n in self._source.entries if s in (*WEIGHTS, "buffer")}
        shared = self.facts.get("shared") or {}
        return tensors | {alias: tensors[name] for alias, name in shared.items() if name in tensors}


def _of_rank(source: Source, rank: int, name: str) -> Any:
    """What one rank saved under ``name``; None when there is none."""
    return source.rank_fact(rank, name) if isinstance(source, OwnSource) else None


def load_into(
    states: States,
    runtime: Runtime,
    source: Source,
    rules: LoadRules,
    *,
    check: Callable[[], None],
    begin: Callable[[], None],
) -> Loaded:
    """Weights, buffers and optimizer state. Collective; an error on one rank is raised on all.

    ``check`` may refuse the checkpoint too; ``begin`` is called when everything fits: until then nothing has changed.
    """
    if isinstance(source, ReferenceSource):
        source = source.with_groups(states.groups)  # some of its files have numbers instead of names
    mesh, what = states.mesh, f"loading {source.path}"
    with together(mesh, what) as shared:
        match = compare(states, source, rules)
        shared.mine = match.extra
    match.extra = in_no_model(shared.all)
    with together(mesh, what):
        for line in verdict(match, str(source.path), strict=rules.strict):
            logger.warning("loading %s: %s", source.path, line)
        if rules.optimizer:
            check_optimizer(states, source)
        check()
    begin()
    nbytes = sum(u.shard.numel() * u.full.element_size() for u in states.units)
    with together(mesh, what), progress(f"loading {source.path.name}", nbytes, show=mesh.first) as report:
        _fill(states, source, match, rules, report)
    runtime.publish(runtime.units)
    return Loaded(states, source)


def _fill(states: States, source: Source, match: Comparison, rules: LoadRules, report: Callable[[int], None]) -> None:
    if rules.module:
        restore.fill_weights(states, source, match, report)
        restore.fill_buffers(states, source, match)
        saved = source.facts.get("extra_state") or {}
        for path, module in extra_modules(states.module).items():
            if path in saved:
                module.set_extra_state(saved[path])
    if rules.optimizer and states.optimizer is not None:
        groups = source.facts["optimizer"].get("groups", [])
        for group, values in zip(states.optimizer.param_groups, groups, strict=True):
            group.update({k: v for k, v in values["options"].items() if k != "params"})
        restore.fill_optimizer(states, source, match, report)
        _fill_odd(states, states.optimizer, source)


def _fill_odd(states: States, optimizer: torch.optim.Optimizer, source: Source) -> None:
    """What the optimizer keeps besides tensors and numbers."""
    odd = _of_rank(source, states.mesh.job.index, "odd") or _of_rank(source, 0, "odd") or {}
    optimizer.state.update(odd.get("shared", {}))
    views = {view_key(v): v for v in states.views}
    for key, values in odd.get("views", {}).items():
        if key not in views:
            raise CheckpointError(
                f"optimizer state {', '.join(values)} is neither a tensor nor a number and belongs to the layout it "
                f"was saved under {restore.CUT_ANEW}"
            )
        optimizer.state[views[key].param].update(values)
