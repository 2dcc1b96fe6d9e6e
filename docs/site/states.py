"""Draw docs/states.png: where each model state rests, on four ranks, by the rows that the configuration really makes.

python docs/site/states.py [FILE]
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch, Rectangle

from deepspeed.config import load_config
from deepspeed.zero.plan import Spread, StateKind, Tier, make_plan

RANKS = 4
BYTES = {StateKind.PARAM: 2, StateKind.GRAD: 4, StateKind.OPTIM: 12}  # of a parameter: bf16, fp32 sums, AdamW
COLOURS = {StateKind.PARAM: "#3f6fb5", StateKind.GRAD: "#d98c2b", StateKind.OPTIM: "#5b9a58"}
LABELS = {
    StateKind.PARAM: "PARAM: weights in bf16, 2 bytes",
    StateKind.GRAD: "GRAD: sums in fp32, 4 bytes",
    StateKind.OPTIM: "OPTIM: fp32 weights and AdamW's moments, 12 bytes",
}
FLOORS = {Tier.DEVICE: 13.0, Tier.HOST: 6.5, Tier.NVME: 0.0}  # where each tier's band begins
TOP = 33.0
NAMES = {Tier.DEVICE: "device", Tier.HOST: "host\nmemory", Tier.NVME: "drive"}
HOST = {"device": "cpu"}
DRIVE = {"device": "nvme", "nvme_path": "/local_nvme", "max_in_cpu": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2,\noptimizer on host": {"stage": 2, "offload_optimizer": HOST},
    "stage 3,\nall on host": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
    "stage 3,\nall on a drive": {
        "stage": 3,
        "offload_optimizer": {key: DRIVE[key] for key in ("device", "nvme_path")},
        "offload_param": DRIVE,
    },
}


def rest(zero: dict[str, Any]) -> dict[StateKind, tuple[Tier, float]]:
    """Tier and bytes a parameter of each state on one rank."""
    row = make_plan(load_config({"train_batch_size": RANKS, "zero_optimization": zero}, world_size=RANKS), RANKS).row(
        trainable=True, persistent=False
    )
    places = {kind: row.of(kind) for kind in StateKind}
    return {
        kind: (state.tier, BYTES[kind] / (RANKS if Spread.SHARDED in state.spread else 1))
        for kind, state in places.items()
    }


def draw(path: Path) -> None:
    """A column for each setting, four bars in it, one for each rank; a band for each tier."""
    figure, axes = pyplot.subplots(figsize=(12, 5.6))
    for tier, floor in FLOORS.items():
        top = min((above for above in FLOORS.values() if above > floor), default=TOP)
        axes.axhspan(floor, top, color="#f4f4f4" if tier is Tier.HOST else "#ffffff", zorder=0)
        axes.text(-0.95, (floor + top) / 2, NAMES[tier], ha="center", va="center", fontsize=11)
    for column, (name, zero) in enumerate(SETTINGS.items()):
        states = rest(zero)
        heights = dict.fromkeys(FLOORS, 0.0)
        for kind, (tier, nbytes) in states.items():
            for rank in range(RANKS):
                corner = (column - 0.36 + 0.19 * rank, FLOORS[tier] + 0.6 + heights[tier])
                axes.add_patch(Rectangle(corner, 0.15, nbytes, color=COLOURS[kind], zorder=2))
            heights[tier] += nbytes
        here = sum(nbytes for tier, nbytes in states.values() if tier is Tier.DEVICE)
        axes.text(column, TOP + 1.2, name, ha="center", va="bottom", fontsize=10)
        axes.text(column, TOP - 0.2, f"device: {here:g} B", ha="center", va="bottom", fontsize=9, color="#555555")
    axes.set(xlim=(-1.3, len(SETTINGS) - 0.5), ylim=(0, TOP + 5))
    axes.axis("off")
    axes.legend(
        handles=[Patch(color=COLOURS[kind], label=LABELS[kind]) for kind in StateKind],
        loc="upper center", bbox_to_anchor=(0.54, 0.0), ncol=3, frameon=False, fontsize=10,
    )  # fmt: skip
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "states.png")
