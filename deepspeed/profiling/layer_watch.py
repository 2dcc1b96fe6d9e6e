"""Looks at the gradient of every parameter, at every update: zero, not finite, or rows that never get any.

A row of a weight is a unit of its layer (of an expert, a head); one without a gradient in a whole window is dead, as
behind a ReLU that is always off. Tables (``nn.Embedding``) are left out: most rows of these rest at any update.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

from deepspeed.comm.collectives import sum_in_place
from deepspeed.monitor.events import GRADIENTS
from deepspeed.monitor.log import logger
from deepspeed.tensor.layers import HiddenParallelEmbedding, VocabParallelEmbedding
from deepspeed.zero.layout import Segment
from deepspeed.zero.plan import StateKind
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.unit import Unit

_PATIENCE = 3  # updates in a row: a gradient is rightly zero at the first one behind weights that begin as zeros
_SHOWN = 8  # names
_TABLES = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding, HiddenParallelEmbedding)


class LayerWatch:
    """Listen to one engine, on all ranks, between the arrival of gradients and the update; ``window``: see above."""

    def __init__(self, model: nn.Module, runtime: Runtime, window: int) -> None:
        self._runtime, self._window, self._updates = runtime, window, 0
        tables = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, _TABLES)}
        self._segments = [(u, s) for u in runtime.units if u.trainable for s in u.layout.segments]
        self._names = [s.name for _, s in self._segments]
        self._parts = {s.name for _, s in self._segments if s.place is not None}  # tensor-parallel ones
        rows = {s.name: s.shape[0] for _, s in self._segments if len(s.shape) > 1 and s.name not in tables}
        self._touched = {n: torch.zeros(count, dtype=torch.bool, device=runtime.device) for n, count in rows.items()}
        self._zero_for = dict.fromkeys(self._names, 0)
        self._noted: set[tuple[str, str]] = set()

    def __call__(self, kind: str, units: Sequence[Unit]) -> None:
        """Check the gradients of ``units``, which are at rest, and log new findings. Collective; waits for them."""
        if kind != GRADIENTS:
            return
        sums = torch.zeros(len(self._names), dtype=torch.float64, device=self._runtime.device)
        place = {name: i for i, name in enumerate(self._names)}
        try:
            for unit in units:
                with unit.values(StateKind.GRAD) as grad:
                    for segment in unit.layout.segments:
                        part = unit.part(StateKind.GRAD, segment, grad)
                        if part.numel():
                            sums[place[segment.name]] = part.abs().sum(dtype=torch.float32)
                            self._touch(unit, segment, part)
        except (OSError, RuntimeError) as error:  # the others wait; whoever updates meets the same error
            logger.warning("step %d: gradients were not looked at: %s", self._runtime.steps + 1, error)
        mesh = self._runtime.mesh
        norms = dict(zip(self._names, sum_in_place(sum_in_place(sums, mesh.zero), mesh.tp).tolist(), strict=True))
        self._updates += 1
        for name, value in norms.items():
            self._zero_for[name] = self._zero_for[name] + 1 if value == 0 else 0
        self._say("is not finite", [n for n, value in norms.items() if not math.isfinite(value)])
        text = f"has been zero for {_PATIENCE} updates: nothing trains it"
        self._say(text, [n for n, count in self._zero_for.items() if count >= _PATIENCE])
        if self._updates % self._window == 0:
            self._count_dead()

    def _touch(self, unit: Unit, segment: Segment, part: torch.Tensor) -> None:
        """Note the rows of which this rank's part has a gradient."""
        touched = self._touched.get(segment.name)
        if touched is None:
            return
        width = math.prod(segment.shape[1:])
        low, high = (at - segment.offset for at in unit.layout.overlap(segment, *unit.range_of(StateKind.GRAD)))
        first, last = low // width, -(-high // width)
        whole = nn.functional.pad(part, (low - first * width, last * width - high))
        touched[first:last] |= (whole.to(touched.device).view(-1, width) != 0).any(1)

    def _count_dead(self) -> None:
        if not self._touched:
            return
        flags = sum_in_place(torch.cat([*self._touched.values()]).float(), self._runtime.mesh.zero)
        counts = (flags == 0).split([rows.numel() for rows in self._touched.values()])
        dead = {name: int(rows.sum()) for name, rows in zip(self._touched, counts, strict=True)}
        for name, count in dead.items():
            rows = self._touched[name].numel()
            if 0 < count < rows:
                part = f" on tensor-parallel rank {self._runtime.mesh.tp.index}" if name in self._parts else ""
                text = f"has not reached {count} of its {rows} rows{part} for {self._window} updates: dead units"
                self._say(text, [name], kind="dead")
            self._touched[name].zero_()

    def _say(self, finding: str, names: Sequence[str], kind: str = "") -> None:
        """Warn once for each parameter, on the first of the ranks that share it; of dead rows, for each part of it."""
        mesh = self._runtime.mesh
        first = mesh.zero.index == 0 and (mesh.tp.index == 0 or (kind == "dead" and names[0] in self._parts))
        new = [name for name in names if (kind or finding, name) not in self._noted]
        self._noted.update((kind or finding, name) for name in new)
        if new and first:
            more = f" and {len(new) - _SHOWN} others" if len(new) > _SHOWN else ""
            logger.warning(
                "step %d: the gradient of %s%s %s", self._runtime.steps + 1, ", ".join(new[:_SHOWN]), more, finding
            )
