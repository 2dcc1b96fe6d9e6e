"""A large decoder on many devices under several layouts, simulated: nobody has run them.

    python benchmarks/layouts.py run [--only NAME ...]     simulate the layouts, into data/layouts.json
    python benchmarks/layouts.py report                    the tables, into docs/parallelism.md, and the picture

The real engine runs on the simulated device (docs/simulator.md), as one rank of every pipeline stage. A 70B Llama
(80 blocks of width 8,192, 64 heads of which 8 have keys, 32,000 words, every block recomputed) on 512 H100 of 64 nodes,
512 sequences of 4,096 tokens an update.
"""

import argparse
import functools
import json
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.tools.simulate.costs import MESSAGES, load_machine
from deepspeed.tools.simulate.events import COMPUTE
from deepspeed.tools.simulate.models import Shape, decoder_subject
from deepspeed.tools.simulate.pipeline.run import PipelineOutcome, simulate_pipeline
from deepspeed.tools.simulate.run import Outcome, RankJob, simulate

HERE = Path(__file__).parent
DATA, DOCS = HERE / "data/layouts.json", HERE.parent / "docs/parallelism.md"
LLAMA = Shape(8192, 80, 64, 28672, 32000, 4096, 8, gated=True)
WORLD, SEQUENCES, TOKENS, DEVICE = 512, 512, 4096, "h100"
PARAMETERS = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192) + 2 * 32000 * 8192 + 8192


class Layout(NamedTuple):
    """How the ranks are cut, ``micro`` sequences a micro-batch; what is left is data parallel, under ZeRO ``level``."""

    pp: int
    tp: int
    level: int
    micro: int
    schedule: str = "1f1b"
    chunks: int = 1

    @property
    def dp(self) -> int:
        return WORLD // self.pp // self.tp

    @property
    def micros(self) -> int:
        return SEQUENCES // self.dp // self.micro

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.micros,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.level},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
        if self.tp > 1:
            config["tensor_parallel"] = {"autotp_size": self.tp}
        if self.pp > 1:
            pipeline = {"stages": self.pp, "schedule": self.schedule, "chunks_per_stage": self.chunks}
            config["pipeline"] = pipeline
        return config


LAYOUTS = {
    "dp512": Layout(1, 1, 3, 1),
    "tp8": Layout(1, 8, 3, 4),
    "tp8-pp4": Layout(4, 8, 1, 4),
    "tp8-pp4-interleaved": Layout(4, 8, 1, 4, "interleaved", 2),
    "tp8-pp8": Layout(8, 8, 1, 4),
    "tp8-pp8-zb": Layout(8, 8, 1, 4, "zero_bubble"),
    "pp8": Layout(8, 1, 1, 1),
}


def _stage(outcome: Outcome, idle: float) -> dict[str, Any]:
    totals = defaultdict[str, float](float)
    for (name, _), seconds in outcome.exposed.items():
        if name not in MESSAGES:
            totals[name] += seconds
    return {
        "seconds": outcome.seconds, "compute": outcome.busy.get(COMPUTE, 0.0), "bubble": idle, "exposed": totals,
        "messages": sum(s for (name, _), s in outcome.exposed.items() if name in MESSAGES),
        "late": sum(outcome.late.values()), "states": outcome.states, "peak": outcome.peak,
        "reserved": outcome.reserved, "unordered": len(outcome.unordered),
    }  # fmt: skip


def _simulated(layout: Layout) -> dict[str, Any]:
    make = functools.partial(decoder_subject, "llama-70b", LLAMA, samples=layout.micro, sequence=TOKENS, recompute=True)
    machine, begin = load_machine(DEVICE), time.process_time()
    if layout.pp == 1:
        outcome = simulate(make(), layout.config(), machine, world=WORLD, steps=3)
        facts: dict[str, Any] = {"window": outcome.seconds, "stages": [_stage(outcome, 0.0)], "actions": []}
    else:
        done: PipelineOutcome = simulate_pipeline(make, RankJob(layout.config(), machine, WORLD, steps=2))
        stages = [_stage(outcome, done.bubble(i)) for i, outcome in enumerate(done.steps)]
        rows = [[[*one.action, one.start, one.end] for one in row] for row in done.actions]
        facts = {"window": done.window, "stages": stages, "actions": rows}
    return facts | {"seconds": max(s["seconds"] for s in facts["stages"]), "process": time.process_time() - begin}


def run(names: list[str]) -> None:
    """Simulate those layouts, and keep what was found of the others."""
    for name in names or LAYOUTS:
        facts = _simulated(LAYOUTS[name])
        found = json.loads(DATA.read_text()) if DATA.exists() else {}
        DATA.write_text(json.dumps(found | {name: facts}, indent=None).replace("}, ", "},\n") + "\n")
        print(name, f"{facts['seconds']:.2f} s", flush=True)


def _name(layout: Layout) -> str:
    schedule = f", {layout.schedule}" if layout.pp > 1 else ""
    return f"pp {layout.pp} x dp {layout.dp} x tp {layout.tp}, ZeRO-{layout.level}{schedule}"


def _parts(layout: Layout, facts: dict[str, Any]) -> dict[str, float]:
    """Seconds of the step, as means over the stages. A stage that is done waits for the others in the sum of the norms:
    that is the bubble's, and not a transfer's.
    """
    rows, step = facts["stages"], facts["seconds"]
    compute = sum(row["compute"] for row in rows) / len(rows)
    bubble = sum(row["bubble"] for row in rows) / len(rows) if layout.pp > 1 else 0.0
    exposed = sum(sum(row["exposed"].values()) for row in rows) / len(rows)
    exposed = min(exposed, step - compute - bubble)
    return {
        "compute": compute, "exposed transfers": exposed, "bubble": bubble,
        "rest": max(0.0, step - compute - exposed - bubble),
    }  # fmt: skip


def _row(name: str, facts: dict[str, Any]) -> str:
    """A row of the table: shares are means over the stages; memory is that of the fullest."""
    layout, rows, step = LAYOUTS[name], facts["stages"], facts["seconds"]
    parts, rate = _parts(layout, facts), SEQUENCES * TOKENS / step / WORLD
    share = 6 * PARAMETERS * rate / load_machine(DEVICE)["flops_bf16"]
    times = f"{step:.2f} s | {rate:.0f} | {share:.0%} | {parts['exposed transfers'] / step:.1%}"
    bubble = f"{parts['bubble'] / facts['window']:.1%}" if layout.pp > 1 else "-"
    states, most = (max(row[key] for row in rows) / 2**30 for key in ("states", "peak"))
    return (
        f"| {_name(layout)} | {layout.micros} x {layout.micro} | {times} | {bubble} | {states:.1f} | {most:.1f} GiB |"
    )


def report() -> None:
    """Write the table between its marks, and draw the picture."""
    facts = {name: row for name, row in json.loads(DATA.read_text()).items() if name in LAYOUTS}
    facts = {name: facts[name] for name in LAYOUTS if name in facts}
    unordered = sum(stage["unordered"] for row in facts.values() for stage in row["stages"])
    lines = [
        f"`benchmarks/layouts.py`, simulated, not measured; {unordered} accesses without order.",
        "",
        "| layout | micro-batches | step | tokens/s a device | of the peak | exposed | bubble | states, GiB | peak |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(name, row) for name, row in facts.items()),
    ]
    text = DOCS.read_text()
    before, _, rest = text.partition("<!-- layouts -->\n")
    _, _, behind = rest.partition("<!-- end of layouts -->")
    DOCS.write_text(before + "<!-- layouts -->\n" + "\n".join(lines) + "\n<!-- end of layouts -->" + behind)
    print("\n".join(lines))
    _draw(facts)


def _draw(facts: dict[str, dict[str, Any]]) -> None:
    """Of every pipeline what its stages do when; above it, what the steps of all layouts are made of."""
    import_module("matplotlib").use("Agg")
    plot = import_module("matplotlib.pyplot")
    piped = [name for name in facts if facts[name]["actions"]]
    heights = [0.45 * len(facts) + 0.6, *(0.28 * LAYOUTS[name].pp + 0.4 for name in piped)]
    figure, panes = plot.subplots(
        len(heights), 1, figsize=(13, sum(heights) + 0.5 * len(heights)), height_ratios=heights, layout="constrained"
    )
    top = panes[0] if piped else panes
    for at, (name, row) in enumerate(facts.items()):
        stages, left, parts = row["stages"], 0.0, _parts(LAYOUTS[name], row)
        for (what, seconds), colour in zip(parts.items(), ("#4c78a8", "#f58518", "#bab0ac", "#e4e4e4"), strict=True):
            top.barh(at, seconds, left=left, color=colour, label=what if at == 0 else None)
            left += seconds
        fullest = max(s["peak"] for s in stages) / 2**30
        top.text(left, at, f" {left:.2f} s, peak {fullest:.0f} GiB", va="center", fontsize=8)
    top.set_yticks(range(len(facts)), [_name(LAYOUTS[name]) for name in facts], fontsize=8)
    top.invert_yaxis()
    top.margins(x=0.15)
    top.legend(loc="upper right", fontsize=8, ncols=4)
    top.set_title(f"Simulated: 70B Llama, {WORLD} H100, {SEQUENCES} sequences of {TOKENS} tokens a step (seconds)")
    colours = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}
    longest = max(facts[name]["seconds"] for name in piped)
    for pane, name in zip(panes[1:], piped, strict=True):
        for stage, actions in enumerate(facts[name]["actions"]):
            for op, chunk, _, start, end in actions:
                shade = 1.0 if chunk < LAYOUTS[name].pp else 0.55
                pane.barh(
                    stage, end - start, left=start, color=colours[op], alpha=shade, edgecolor="white", linewidth=0.3
                )
        pane.set_yticks(range(LAYOUTS[name].pp), [f"stage {i}" for i in range(LAYOUTS[name].pp)], fontsize=7)
        pane.invert_yaxis()
        pane.set_xlim(0, longest)
        pane.set_title(f"{_name(LAYOUTS[name])}: forwards blue, backwards green, weights yellow", fontsize=9)
    figure.savefig(DOCS.parent / "parallelism.png", dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--only", nargs="*", default=[], choices=LAYOUTS)
    options = parser.parse_args()
    run(options.only) if options.command == "run" else report()
