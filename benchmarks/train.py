"""Compare training steps of this project with torch FSDP2, DDP and the reference DeepSpeed: same model, data, dtype and
ranks.

Every measurement is a fresh torchrun of ``peers/<peer>.py``. The peers alternate within each round, so that a machine
that slows down slows all of them. Prints one JSON line per measurement, a table of medians at the end, and with
--write-docs puts the tables between the ``train:`` markers of docs/benchmarks.md. See benchmarks/README.md for the
reference's own environment.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- train:begin -->", "<!-- train:end -->"
DEFAULT_PEERS = {
    "134m": ["ours:3", "fsdp2", "reference:3"],
    "33.7m": ["ours:1", "reference:1", "ours:2", "reference:2", "ours:3", "reference:3", "fsdp2", "ddp"],
    "10m": ["ours:1:pp2", "reference:1:pp2", "ours:3:tp2", "fsdp2:3:tp2"],
    "tiny": ["ours:3", "fsdp2", "ddp", "reference:3"],
}
MIB = 2**20


@dataclass(frozen=True)
class Contender:
    """One column of the comparison: ``peer[:level[:variant]]``."""

    peer: str
    level: int = 3
    variant: str = "default"

    @classmethod
    def parse(cls, text: str) -> "Contender":
        """Raises ValueError where the peer is unknown or the level is not 0..3."""
        peer, *rest = text.split(":")
        if peer not in ("ours", "before", "fsdp2", "ddp", "reference"):
            raise ValueError(f"unknown peer {peer!r} in {text!r}; known: ours, before, fsdp2, ddp, reference")
        level = int(rest[0]) if rest and rest[0] else 3
        if level not in range(4):
            raise ValueError(f"level {level} in {text!r} is not 0, 1, 2 or 3")
        return cls(peer, level, rest[1] if len(rest) > 1 else "default")

    @property
    def script(self) -> str:
        """Who runs it, in ``peers``."""
        return "ours" if self.peer == "before" else self.peer

    @property
    def name(self) -> str:
        """As it stands in the tables."""
        base = {
            "ours": f"this project, ZeRO-{self.level}",
            "before": f"before, ZeRO-{self.level}",
            "fsdp2": "torch FSDP2",
            "ddp": "torch DDP",
        }
        label = base.get(self.peer, f"reference, ZeRO-{self.level}")
        return label if self.variant == "default" else f"{label} ({self.variant})"


@dataclass(frozen=True)
class Summary:
    """Medians over all timed steps of all rounds; memory in MiB of the larger rank, ``cpu_s`` the processor time of all
    ranks in a step.
    """

    contender: Contender
    step_s: float
    fastest_round_s: float
    slowest_round_s: float
    cpu_s: float
    tokens_per_s: float
    peak_mib: float
    base_mib: float
    framework: str

    @property
    def above_base_mib(self) -> float:
        """Peak resident memory without torch, the framework and the process group."""
        return self.peak_mib - self.base_mib


@dataclass(frozen=True)
class Target:
    """``ours`` must be at most ``factor`` times ``other`` (a contender, or the needed memory where None) in
    ``metric``.
    """

    model: str
    ours: str
    other: str | None
    metric: str
    factor: float


TARGETS = [
    Target("134m", "ours:3", "fsdp2", "step_s", 1.0),
    Target("134m", "ours:3", "reference:3", "step_s", 0.8),
    Target("33.7m", "ours:1", "reference:1", "step_s", 0.95),
    Target("33.7m", "ours:2", "reference:2", "step_s", 0.95),
    Target("134m", "ours:3", "reference:3", "above_base_mib", 0.7),
    Target("134m", "ours:3", None, "above_base_mib", 1.25),
    Target("134m", "ours:3:compiled", "fsdp2:3:compiled", "step_s", 1.0),
    Target("134m", "ours:3:compiled", "fsdp2:3:compiled_model", "step_s", 1.0),
    Target("33.7m", "ours:3:compiled", "fsdp2:3:compiled", "step_s", 1.0),
    Target("33.7m", "ours:3:compiled", "fsdp2:3:compiled_model", "step_s", 1.0),
    Target("10m", "ours:1:pp2", "reference:1:pp2", "step_s", 0.9),
    Target("10m", "ours:3:tp2", "fsdp2:3:tp2", "step_s", 1.0),
    Target("134m", "ours:3:nvme", "reference:3:nvme", "step_s", 0.5),
]


def environment(contender: Contender, args: argparse.Namespace) -> dict[str, str]:
    """The machine's environment without a PYTHONPATH of the caller; only ``ours`` sees this tree."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": str(args.threads), "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    if contender.peer in ("ours", "before"):
        env["PYTHONPATH"] = str(ROOT if contender.peer == "ours" else args.before.absolute())
    if contender.peer == "reference":  # its just-in-time builds look for ninja on the PATH
        env |= {
            "DS_ACCELERATOR": "cpu",
            "PATH": f"{Path(args.reference_python).absolute().parent}{os.pathsep}{env['PATH']}",
        }
    return env


def measure(model: str, contender: Contender, args: argparse.Namespace) -> dict[str, Any] | None:
    """One fresh run; None (with the reason on stderr) where it failed."""
    python = args.reference_python if contender.peer == "reference" else sys.executable
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    command += [
        str(ROOT / "benchmarks" / "peers" / f"{contender.script}.py"),
        "--model",
        model,
        "--level",
        str(contender.level),
    ]
    command += [
        "--variant",
        contender.variant,
        "--steps",
        str(args.steps),
        "--warmup",
        str(args.warmup),
        "--threads",
        str(args.threads),
    ]
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # not the repository: the current folder is on the path of ``python -m``
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(contender, args),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=args.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            errors += f"\nstopped after {args.timeout} s"
    lines = [line.partition("RESULT ")[2] for line in output.splitlines() if "RESULT " in line]
    if not lines:
        sys.stderr.write(f"{contender.name} on {model} failed, exit code {process.returncode}:\n{errors[-3000:]}\n")
        return None
    return json.loads(lines[-1])


def summarize(contender: Contender, rows: list[dict[str, Any]]) -> Summary:
    """Medians of one contender's rounds."""
    step = statistics.median(value for row in rows for value in row["step_s"])
    rounds = [statistics.median(row["step_s"]) for row in rows]
    return Summary(
        contender,
        step_s=step,
        fastest_round_s=min(rounds),
        slowest_round_s=max(rounds),
        cpu_s=statistics.median(value for row in rows for value in row["cpu_s"]),
        tokens_per_s=rows[0]["tokens_per_step"] / step,
        peak_mib=statistics.median(row["hwm_mib"] for row in rows),
        base_mib=statistics.median(row["base_mib"] for row in rows),
        framework=rows[0]["framework"],
    )


def table(model: str, summaries: list[Summary], args: argparse.Namespace) -> str:
    """The comparison of one model in Markdown."""
    workload = WORKLOADS[model]
    sizes = workload.model
    lines = [
        f"### {model}: {sizes.layers} layers, width {sizes.width}, vocabulary {sizes.vocab:,}, "
        f"sequence {sizes.context}, micro-batch {workload.micro_batch}",
        "",
        "| | step, s | rounds, s | processor, s | tokens/s | peak, MiB per rank | above base, MiB | base, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in summaries:
        lines.append(
            f"| {row.contender.name} | {row.step_s:.3f} | {row.fastest_round_s:.3f} to "
            f"{row.slowest_round_s:.3f} | {row.cpu_s:.3f} | {row.tokens_per_s:,.0f} "
            f"| {row.peak_mib:,.0f} | {row.above_base_mib:,.0f} | {row.base_mib:,.0f} |"
        )
    needed = workload.resident_bytes(args.ranks) / MIB
    versions = ", ".join(dict.fromkeys(row.framework for row in summaries))
    lines += [
        "",
        f"Frameworks: {versions}. Share of 18 bytes per parameter, two gathered units and activations: "
        f"{needed:,.0f} MiB per rank.",
    ]
    return "\n".join(lines)


def targets(model: str, summaries: list[Summary], ranks: int) -> list[str]:
    """A table row for each target whose contenders were both measured."""
    found = {row.contender: row for row in summaries}
    lines = []
    for target in TARGETS:
        ours, other = (
            found.get(Contender.parse(target.ours)),
            found.get(Contender.parse(target.other)) if target.other else None,
        )
        if target.model != model or ours is None or (target.other and other is None):
            continue
        limit = getattr(other, target.metric) if other else WORKLOADS[model].resident_bytes(ranks) / MIB
        ratio = getattr(ours, target.metric) / limit
        against = other.contender.name if other else "share + two units + activations"
        what = {"step_s": "step time", "above_base_mib": "peak memory above base"}[target.metric]
        verdict = "reached" if ratio <= target.factor else "missed"
        lines.append(
            f"| {model} | {ours.contender.name} | {against} | {what} | {target.factor} | {ratio:.3f} | {verdict} |"
        )
    return lines


def machine(args: argparse.Namespace, dtype: str = "bf16 (pp2 and tp2: fp32)") -> str:
    """Where, when and how, in one paragraph."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return (
        f"Measured {datetime.datetime.now(tz=datetime.timezone.utc):%Y-%m-%d %H:%M} UTC on {cpu}, "
        f"{os.cpu_count()} cores, load average "
        f"{args.load:.2f} at the start; torch {torch.__version__}, Python {platform.python_version()}; "
        f"{args.ranks} ranks, gloo, "
        f"{args.threads} thread{'s' * (args.threads > 1)} per rank, AdamW, {dtype}. "
        f"{args.rounds} alternating round{'s' * (args.rounds > 1)} of {args.steps} "
        "timed steps "
        f"after {args.warmup} warm-up steps in a fresh process group; medians of all timed steps, the larger "
        "rank's peak resident memory."
    )


def write_section(text: str) -> None:
    """Replace what stands between the markers of docs/benchmarks.md; raises ValueError where they are missing."""
    page = DOCS.read_text()
    if BEGIN not in page or END not in page:
        raise ValueError(f"{DOCS} has no {BEGIN} ... {END} section to write to")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    DOCS.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(WORKLOADS), default=["134m", "33.7m"])
    parser.add_argument(
        "--peers", nargs="+", metavar="PEER[:LEVEL[:VARIANT]]", help="who is compared; by default a list for each model"
    )
    parser.add_argument("--rounds", type=int, default=3, help="times every peer has its turn")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one turn")
    parser.add_argument(
        "--reference-python",
        type=Path,
        default=ROOT / ".bench" / "reference" / "bin" / "python",
        help="see benchmarks/README.md",
    )
    parser.add_argument(
        "--before", type=Path, default=ROOT, help="another checkout of this project, which the peer 'before' runs"
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / ".bench" / "train.jsonl", help="every measurement is appended here"
    )
    parser.add_argument("--write-docs", action="store_true", help="write the tables into docs/benchmarks.md")
    args = parser.parse_args()
    if min(args.rounds, args.steps, args.ranks, args.threads) < 1 or args.warmup < 0:
        parser.error("--rounds, --steps, --ranks and --threads must be at least 1, --warmup at least 0")
    try:
        for text in args.peers or []:
            Contender.parse(text)
    except ValueError as error:
        parser.error(str(error))
    args.load = os.getloadavg()[0]
    return args


def compare(model: str, args: argparse.Namespace) -> tuple[list[Summary], int]:
    """All rounds of one model: a summary of each contender that succeeded at least once, and the number of failed
    turns.
    """
    contenders = list(dict.fromkeys(Contender.parse(text) for text in args.peers or DEFAULT_PEERS[model]))
    if not args.reference_python.is_file():
        sys.stderr.write(
            f"the reference is left out: no interpreter at {args.reference_python} (benchmarks/README.md says "
            "how to make one)\n"
        )
        contenders = [contender for contender in contenders if contender.peer != "reference"]
    rows: dict[Contender, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for round_index in range(args.rounds):
        for contender in contenders:
            row = measure(model, contender, args)
            if row is None:
                continue
            rows[contender].append(row)
            line = json.dumps({"round": round_index, **row})
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            with args.json.open("a") as file:
                file.write(line + "\n")
    failed = args.rounds * len(rows) - sum(map(len, rows.values()))
    return [summarize(contender, measured) for contender, measured in rows.items() if measured], failed


def main() -> int:
    """Measure, print, write; 1 where a turn failed or nothing was measured."""
    args = parse_arguments()
    if args.load > 0.5:
        sys.stderr.write(
            f"warning: load average {args.load:.2f}: other work on this machine will show in the figures\n"
        )
    sections, rows, failed, measured = [machine(args)], [], 0, 0
    for model in args.models:
        summaries, failures = compare(model, args)
        failed += failures
        measured += len(summaries)
        if summaries:
            sections.append(table(model, summaries, args))
        rows += targets(model, summaries, args.ranks)
    if rows:
        header = "| model | this | against | of | at most | measured | |\n|---|---|---|---|---|---|---|\n"
        sections.append("### Targets\n\n" + header + "\n".join(rows))
    text = "\n\n".join(sections)
    sys.stdout.write(text + "\n")
    if args.write_docs and measured:
        write_section(text)
    return 0 if measured and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
