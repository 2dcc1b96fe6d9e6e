"""Long sequences on devices that are not here, simulated: how many tokens fit, by which switch, and how long they take.

    python benchmarks/sequences_simulated.py [--only switches fits steps]

The real engine runs as one rank on the simulated device (docs/simulator.md):
ZeRO-3, bf16, blocks recomputed, one sequence over all devices of a row. "Fits": what PyTorch's allocator reserves is at
most the device. ``switches``: AdamW in host memory, one switch of the block ``sequence`` after the other; the number of
tokens where the device is full follows from two lengths, between which memory grows evenly.

"Planned": ``sequence.plan``, which chooses in the third step, in place of recomputation and host memory for all.

Attention is charged at the rate of PyTorch's kernel, fitted on published steps of 2,048 to 8,192 tokens, and once more
at the rate that the authors of FlashAttention found for long sequences.
"""

import argparse
from dataclasses import replace
from typing import Any, NamedTuple

from deepspeed.tools.simulate.costs import Machine, load_machine
from deepspeed.tools.simulate.models import Shape, decoder_subject
from deepspeed.tools.simulate.run import Outcome, simulate

GATED: dict[str, Any] = {"gated": True, "positions": 1 << 20, "key_heads": 8}
LLAMA_8B = Shape(4096, 32, 32, 14336, 128256, **GATED)
QWEN3_8B = Shape(4096, 36, 32, 12288, 151936, normed=True, head=128, **GATED)
LLAMA_7B = Shape(4096, 32, 32, 11008, 32000, **GATED | {"key_heads": 32})
SWITCHES: dict[str, dict[str, Any]] = {
    "none": {"loss": "whole", "mlp_tiles": 1},
    "loss in tiles": {"loss": "auto"},
    "MLP in tiles": {"mlp_tiles": "auto"},
    "activations in host memory": {"offload_activations": True},
}
PLANNED = {"offload_activations": False, "plan": "auto"}
GIB = 2**30
# Shares of the bf16 peak, both ways, causal, heads of 128: Dao 2023, figure 4; Shah et al. 2024, figures 5 and 6.
LONG_ATTENTION = {"a100": 0.60, "h100": 0.58}


class Job(NamedTuple):
    """Model, tokens of its one sequence, devices, kind of device; the switches."""

    shape: Shape
    tokens: int
    devices: int
    machine: Machine
    block: dict[str, Any]

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "sequence_parallel_size": self.devices,
            "sequence": self.block,
        }

    def played(self) -> Outcome:
        subject = decoder_subject("decoder", self.shape, samples=1, sequence=self.tokens, recompute=True)
        world, steps = self.devices, 3 if "plan" in self.block else 2
        return simulate(subject, self.config(), self.machine, world=world, rank=world - 1, steps=steps)

    def operations(self) -> float:
        """Of the model, without what is recomputed: 6 for each weight and token, and half the square of scores."""
        shape = self.shape
        attention = 2 * shape.width * shape.channels * (shape.heads + shape.key_heads)
        weights = shape.blocks * (attention + 3 * shape.width * shape.inner) + shape.vocabulary * shape.width
        scores = 6.0 * shape.blocks * shape.heads * shape.channels * self.tokens**2
        return 6.0 * weights * self.tokens + scores

    def share(self, outcome: Outcome) -> float:
        """Of the peak."""
        return self.operations() / outcome.seconds / self.devices / self.machine["flops_bf16"]


def host_bytes(outcome: Outcome, job: Job) -> float:
    """Of one node."""
    return sum(outcome.host.values()) * min(job.devices, job.machine["gpus_per_node"])


def switches() -> None:
    """How many tokens fill eight devices, switch by switch."""
    print("| switch (each with those above it) | tokens on 8 | bytes a token of a device | host memory of a node |")
    print("|---|---|---|---|")
    machine, block = load_machine("h100"), dict[str, Any]()
    rows = [("one device a sequence", 1, "none"), *(("ranks share it" if n == "none" else n, 8, n) for n in SWITCHES)]
    for title, sharing, name in rows:
        block |= SWITCHES[name]
        lengths = (262_144, 327_680) if "mlp_tiles" in block and block["mlp_tiles"] != 1 else (65_536, 98_304)
        jobs = [Job(LLAMA_8B, n * sharing, sharing, machine, block) for n in lengths]  # short ones have no tiles
        small, large = outcomes = [job.played() for job in jobs]
        slope = (large.reserved - small.reserved) / (jobs[1].tokens - jobs[0].tokens)
        room = machine["device_bytes"] - small.reserved
        tokens = jobs[0].tokens + room / slope
        host = [host_bytes(outcome, job) for outcome, job in zip(outcomes, jobs, strict=True)]
        grown = host[0] + (host[1] - host[0]) * room / (large.reserved - small.reserved)
        print(f"| {title} | {tokens:,.0f} | {slope * sharing / 1024:,.0f} KiB | {grown / GIB:,.0f} GiB |", flush=True)


def fits() -> None:
    """Lengths of ALST (Bekman et al. 2025), with all switches."""
    block = {name: value for switch in SWITCHES.values() for name, value in switch.items()}
    print("| devices | tokens | reserved | host memory of a node | step | of the peak | fits |")
    print("|---|---|---|---|---|---|---|")
    for devices, tokens in ((1, 500_000), (8, 3_700_000), (32, 15_000_000)):
        job = Job(LLAMA_8B, tokens, devices, load_machine("h100"), block)
        outcome = job.played()
        over, host = outcome.reserved > job.machine["device_bytes"], host_bytes(outcome, job) / GIB
        print(
            f"| {devices} | {tokens:,} | {outcome.reserved / GIB:.1f} GiB | {host:,.0f} GiB | "
            f"{outcome.seconds:,.0f} s | {job.share(outcome):.1%} | {'no' if over else 'yes'} |",
            flush=True,
        )


def steps() -> None:
    """A million tokens on eight devices, at both rates of attention."""
    block = {name: value for switch in SWITCHES.values() for name, value in switch.items()}
    a800 = replace(load_machine("a100"), name="A800")
    a800.values["node_rate"] *= 400 / 600  # data sheet: NVLink of 400 GB/s
    print("| model, 8 devices | attention at | step | of the peak | peak | host memory |\n|---|---|---|---|---|---|")
    ways = {"fitted": {}, "long": {}, "long, planned": PLANNED}
    for title, shape, kind, machine in (
        ("7B, 1,048,576 tokens, A800", LLAMA_7B, "a100", a800),
        ("Qwen3-8B, 1,048,576 tokens, H100", QWEN3_8B, "h100", load_machine("h100")),
    ):
        for way, more in ways.items():
            share = machine["attention_share"] if way == "fitted" else LONG_ATTENTION[kind]
            faster = replace(machine, values=machine.values | {"attention_share": share})
            job = Job(shape, 1 << 20, 8, faster, block | more)
            outcome, attention = job.played(), f"{share:.0%}{', planned' * bool(more)}"
            print(
                f"| {title} | {attention} | {outcome.seconds:,.0f} s | {job.share(outcome):.1%} | "
                f"{outcome.peak / 1e9:.1f} GB | {host_bytes(outcome, job) / GIB:,.0f} GiB |",
                flush=True,
            )


TABLES = {"switches": switches, "fits": fits, "steps": steps}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*TABLES], choices=[*TABLES])
    for name in parser.parse_args().only:
        TABLES[name]()
        print()
