"""The report of a profile as text: totals, the costliest classes by depth, and every module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed.monitor.program import columns

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))


def amount(value: float, unit: str) -> str:
    """Format a value as ``"1.234 GFLOPS"``: three digits behind the point, scaled by 1000."""
    scale, prefix = next((row for row in _PREFIXES if abs(value) >= row[0]), (1.0, ""))
    digits = 0 if scale == 1.0 and isinstance(value, int) else 3
    return f"{value / scale:.{digits}f} {prefix}{unit}".rstrip()


@dataclass(frozen=True)
class ModuleCost:
    """Cost of one module's forward: elements of its parameters, operations, and seconds."""

    name: str
    kind: str
    params: int
    flops: int
    seconds: float
    whole: bool = False

    @property
    def depth(self) -> int:
        """Return 0 for the model, 1 for its children, and so on."""
        return 0 if self.whole else self.name.count(".") + 1


@dataclass(frozen=True)
class Profile:
    """Content of a report. ``totals``: operations by part of the step; ``notes``: lines about the step as a whole."""

    title: str
    modules: Sequence[ModuleCost]
    totals: Mapping[str, int]
    notes: list[str]


def render(profile: Profile, *, depth: int = -1, top: int = 1, detailed: bool = True) -> str:
    """Return the report. ``depth``: deepest level of the table by class, -1 for all; ``top``: classes at each level."""
    title = f"Flops profile of {profile.title}" if profile.title else "Flops profile"
    lines = [title, *_totals(profile), "", "Costliest classes by depth:", *_by_depth(profile.modules, depth, top)]
    if detailed:
        lines += ["", "Every module (a forward of this rank; latency without waiting for its own parameters):"]
        lines += _tree(profile.modules)
    return "\n".join(lines)


def _totals(profile: Profile) -> list[str]:
    (whole, *_) = [m for m in profile.modules if m.whole]
    rows = [("parameters", amount(whole.params, "")), ("multiply-adds, forward", amount(whole.flops // 2, "MACs"))]
    rows += [(f"operations, {part}", amount(flops, "FLOPS")) for part, flops in profile.totals.items()]
    if whole.seconds:
        rows += [("latency, forward", amount(whole.seconds, "s"))]
    return [*(f"  {line}" for line in columns(rows, left=2)), *(f"  {note}" for note in profile.notes)]


def _by_depth(modules: Sequence[ModuleCost], depth: int, top: int) -> list[str]:
    deepest = max(module.depth for module in modules)
    table: list[tuple[str, ...]] = [("depth", "parameters", "multiply-adds", "latency")]
    for level in range((deepest if depth < 0 else min(depth, deepest)) + 1):
        sums: dict[str, list[float]] = {}
        for module in modules:
            if module.depth == level:
                row = sums.setdefault(module.kind, [0, 0, 0.0])
                for i, value in enumerate((module.params, module.flops // 2, module.seconds)):
                    row[i] += value
        cells = [
            ", ".join(
                f"{kind} {amount(row[i], unit)}"
                for kind, row in sorted(sums.items(), key=lambda item, i=i: -item[1][i])[:top]  # type: ignore[misc]
            )
            for i, unit in enumerate(("", "MACs", "s"))
        ]
        table.append((str(level), *cells))
    return [f"  {line}" for line in columns(table, left=4)]


def _tree(modules: Sequence[ModuleCost]) -> list[str]:
    (whole, *_) = [m for m in modules if m.whole]
    table: list[tuple[str, ...]] = [("module", "class", "parameters", "share", "MACs", "share", "FLOPS", "latency", "")]
    for m in modules:
        name = "  " * m.depth + (m.name.rpartition(".")[2] or "(model)")
        shares = [f"{part / max(total, 1):.1%}" for part, total in ((m.params, whole.params), (m.flops, whole.flops))]
        rate = amount(m.flops / m.seconds, "FLOPS/s") if m.seconds and m.flops else ""
        cells = (amount(m.params, ""), shares[0], amount(m.flops // 2, "MACs"), shares[1], amount(m.flops, "FLOPS"))
        table.append((name, m.kind, *cells, amount(m.seconds, "s") if m.seconds else "-", rate))
    return [f"  {line}" for line in columns(table, left=2)]
