"""Checkpoints: saving, saving behind the training and loading, beside torch, its distributed checkpoint, the reference
and the disk.

    python benchmarks/checkpoint.py                     134M-parameter GPT, 2 ranks over gloo, ZeRO-3, bf16 + AdamW
    after one step python benchmarks/checkpoint.py --small --rounds 1  does it run

Two jobs stay up, of this project and of the reference (``peers/checkpoint_rank.py``), one idle while the other works;
contenders alternate within each round, and every figure is the median of the rounds. Prints one table in Markdown, and
a JSON line per measurement to --json. torch.save: one file per rank, then fsync. torch.distributed.checkpoint: plain
tensors under names that no other rank uses, its own fsync. Both take this rank's fp32 weights and optimizer slots,
which are what the two engines save. "On the disk" adds an fsync of every file.
"""

import argparse
import datetime
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
GB = 1e9
BLOCK_STEPS = 10
PARTS = ("save", "hold", "overhead", "drive", "memory")
RESIDENT = 14  # bytes per parameter: fp32 weight, two moments, bf16 weight


class Job:
    """The ranks of one engine, each answering a line with a line."""

    def __init__(self, args: argparse.Namespace, *, reference: bool, variant: str = "default") -> None:
        self.name = "reference" if reference else "ours"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        env |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "CUDA_VISIBLE_DEVICES": "",
            "WORLD_SIZE": str(args.ranks),
        }
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(args.ranks)}
        env |= {"DS_BENCH_NVME": str(args.folder)}
        python = args.reference_python if reference else Path(sys.executable)
        if reference:  # its just-in-time builds look for ninja on the PATH
            env |= {"DS_ACCELERATOR": "cpu", "PATH": f"{python.absolute().parent}{os.pathsep}{env['PATH']}"}
        else:
            env |= {"PYTHONPATH": str(ROOT)}
        command = [
            str(python),
            str(ROOT / "benchmarks" / "peers" / "checkpoint_rank.py"),
            "--model",
            args.model,
            "--variant",
            variant,
        ]
        command += ["--reference"] if reference else []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the job
        self._ranks = [
            subprocess.Popen(
                command,
                cwd=args.folder,
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
            for rank in range(args.ranks)
        ]
        self.framework = self.ask("ready")[0]["framework"]

    def ask(self, what: str, **arguments: Any) -> list[dict[str, Any]]:
        """The answers of all ranks. Raises SystemExit with the end of their standard error when one has died."""
        line = json.dumps({"do": what, **arguments}) + "\n"
        try:
            for process in self._ranks:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
            return [self._answer(process) for process in self._ranks]
        except (BrokenPipeError, EOFError):
            self.close()
            self._errors.seek(0)
            raise SystemExit(f"{self.name} died at {line.strip()}:\n{self._errors.read()[-4000:]}") from None

    @staticmethod
    def _answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                found: dict[str, Any] = json.loads(line[7:])
                return found
        raise EOFError

    def close(self) -> None:
        """End the ranks."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Bench:
    """All figures of one run: ``figures[name]`` is one row per round."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = Path(args.folder)
        self.figures: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.ours = Job(args, reference=False)
        self.reference = Job(args, reference=True) if args.reference_python.is_file() else None

    def note(self, name: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """Keep the larger figure of the ranks."""
        row = {key: max(a[key] for a in answers) for key in answers[0] if key != "framework"}
        self.figures[name].append(row)
        line = json.dumps({"what": name, **row})
        sys.stderr.write(line + "\n")
        with self.args.json.open("a") as file:
            file.write(line + "\n")
        return row

    def contenders(self, turn: int) -> list[tuple[str, Job, str]]:
        """(name, job, how), beginning with another one each turn."""
        every = [("ours", self.ours, "engine"), ("torch", self.ours, "torch"), ("dcp", self.ours, "dcp")]
        every += [("reference", self.reference, "engine")] if self.reference else []
        turn %= len(every)
        return every[turn:] + every[:turn]

    def place(self, name: str) -> str:
        """An empty place for ``name``; what was there is gone, also on the disk."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
        return str(path)

    def saves_and_loads(self, turn: int) -> None:
        """One round of synchronous saves, of the disk's own speed, and of loads."""
        nbytes = 0
        for name, job, how in self.contenders(turn):
            row = self.note(f"save {name}", job.ask("save", how=how, folder=self.place(name)))
            nbytes = row["bytes"] if name == "ours" else nbytes
        self.note("disk", self.ours.ask("write", folder=self.place("disk"), nbytes=nbytes // self.args.ranks))
        self.place("disk")
        for pages in ("warm", "cold"):
            for name, job, how in self.contenders(turn):
                self.note(f"load {name} {pages}", job.ask("load", how=how, folder=str(self.folder / name), pages=pages))
        for name, _, _ in self.contenders(turn):
            self.place(name)

    def asynchronous(self, turn: int) -> None:
        """One round of what holds the training."""
        every = ["engine", "clone", "copy", "dcp"]
        turn %= len(every)
        for how in every[turn:] + every[:turn]:
            self.note(f"hold {how}", self.ours.ask("hold", how=how, folder=self.place("hold")))
        self.place("hold")

    def overhead(self, turn: int, job: Job | None = None, kind: str = "") -> None:
        """Ten steps with a save behind them, and ten without."""
        found = {}
        for saving in (turn % 2 == 0, turn % 2 == 1):
            place = self.place("train") if saving else ""
            name = f"{kind}steps saving" if saving else f"{kind}steps"
            found[saving] = self.note(name, (job or self.ours).ask("train", steps=BLOCK_STEPS, save=place))["s"]
        self.figures[f"{kind}overhead"].append({"s": found[True] / found[False] - 1})
        self.place("train")

    def drive(self) -> None:
        """Saves of an engine whose states rest on a drive: in the foreground, behind the training, and what steps
        notice of it.
        """
        job = Job(self.args, reference=False, variant="nvme")
        try:
            job.ask("train", steps=2)
            for turn in range(self.args.rounds):
                self.note("drive save", job.ask("save", how="engine", folder=self.place("train")))
                self.note("drive hold", job.ask("hold", how="engine", folder=self.place("train")))
                self.overhead(turn, job, "drive ")
        finally:
            job.close()

    def fresh(self) -> None:
        """Peak memory of a load into an engine that has not made a step."""
        for name, job, how in self.contenders(0):
            if how == "engine":
                job.ask("save", how=how, folder=self.place(name))
        self.close()
        for reference in (False, True) if self.reference else (False,):
            job = Job(self.args, reference=reference)
            answer = job.ask("load", how="engine", folder=str(self.folder / job.name), pages="cold")
            self.note(f"fresh {job.name}", answer)
            self.note("sizes", job.ask("ready"))
            job.close()
            self.place(job.name)

    def close(self) -> None:
        """End the jobs."""
        for job in (self.ours, self.reference):
            if job is not None:
                job.close()

    def s(self, name: str, key: str = "s") -> float:
        """Median of a figure; NaN where it was not taken."""
        rows = self.figures.get(name)
        return median(row[key] for row in rows) if rows else float("nan")


def table(bench: Bench) -> str:
    """Everything in one table of Markdown."""
    s, rows = bench.s, []

    def add(what: str, figure: str, ratio: float, against: str, goal: float, *, least: bool = False) -> None:
        if ratio == ratio:  # else it was not measured
            verdict = "reached" if (ratio >= goal if least else ratio <= goal) else "missed"
            rows.append(
                f"| {what} | {figure} | {against} | {ratio:.2f} | {'at least' if least else 'at most'} {goal} "
                f"| {verdict} |"
            )

    def beside(what: str, figure: str, ratio: float, against: str) -> None:
        if ratio == ratio:
            rows.append(f"| {what} | {figure} | {against} | {ratio:.2f} | | |")

    nbytes = s("save ours", "bytes")
    rate, disk = nbytes / s("save ours") / GB, s("disk", "bytes") / s("disk") / GB
    ref, ref_disk = s("save reference"), s("save reference", "disk_s")
    own, on_disk = s("save ours"), s("save ours", "disk_s")
    sized = f"save, {nbytes / GB:.2f} GB, on the disk"
    add(sized, f"{own:.2f} s, {rate:.2f} GB/s", rate / disk, f"the disk's writes, {disk:.2f} GB/s", 0.9, least=True)
    add(sized, f"{on_disk:.2f} s", on_disk / ref_disk, f"reference, on the disk: {ref_disk:.2f} s", 0.7)
    beside(
        "save, until it returns (ours is on the disk then)",
        f"{own:.2f} s",
        own / ref,
        f"reference, until it returns: {ref:.2f} s",
    )
    for name, label in (("torch", "torch.save + fsync"), ("dcp", "torch.distributed.checkpoint.save")):
        beside(
            sized,
            f"{on_disk:.2f} s",
            on_disk / s(f"save {name}", "disk_s"),
            f"{label}: {s(f'save {name}', 'disk_s'):.2f} s",
        )
    held, clone, other = s("hold engine"), s("hold clone"), s("hold dcp")
    add(
        "asynchronous save, training held",
        f"{held:.2f} s",
        held / clone,
        f"clone of the same tensors: {clone:.2f} s",
        1.1,
    )
    copy = s("hold copy")
    beside(
        "asynchronous save, training held",
        f"{held:.2f} s",
        held / copy,
        f"copy into memory that is there: {copy:.2f} s",
    )
    beside(
        "asynchronous save, training held",
        f"{held:.2f} s",
        held / other,
        f"torch.distributed.checkpoint.async_save: {other:.2f} s",
    )
    with_save, without = s("steps saving"), s("steps")
    what = f"{BLOCK_STEPS} steps with an asynchronous save"
    add(what, f"{with_save:.2f} s", 1 + s("overhead"), f"{BLOCK_STEPS} steps without: {without:.2f} s", 1.05)
    with_save, without = s("steps saving", "cpu"), s("steps", "cpu")
    beside(f"{what}, processor time of a rank", f"{with_save:.2f} s", with_save / without, f"without: {without:.2f} s")
    held, whole = s("drive hold"), s("drive save")
    beside(
        "states on a drive: asynchronous save, training held",
        f"{held:.2f} s",
        held / whole,
        f"the same save in the foreground: {whole:.2f} s",
    )
    with_save, without = s("drive steps saving"), s("drive steps")
    what = f"states on a drive: {BLOCK_STEPS} steps with an asynchronous save"
    add(what, f"{with_save:.2f} s", 1 + s("drive overhead"), f"{BLOCK_STEPS} steps without: {without:.2f} s", 1.05)
    for pages in ("warm", "cold"):
        own, ref = s(f"load ours {pages}"), s(f"load reference {pages}")
        what = f"load, page cache {pages}"
        add(what, f"{own:.2f} s", own / ref, f"reference: {ref:.2f} s", 0.7)
        if pages == "cold":
            reading = s("disk", "read_s")
            beside(what, f"{own:.2f} s", own / reading, f"the disk's reads of as many bytes: {reading:.2f} s")
        for name, label in (("dcp", "torch.distributed.checkpoint.load"), ("torch", "torch.load and a copy")):
            beside(what, f"{own:.2f} s", own / s(f"load {name} {pages}"), f"{label}: {s(f'load {name} {pages}'):.2f} s")
    peak, largest = s("fresh ours", "peak"), s("sizes", "largest")
    share = nbytes / 12 * RESIDENT / bench.args.ranks
    limit = f"shard of {share / MIB:,.0f} MiB; 1.3 of it and the largest tensor ({largest / MIB:,.0f} MiB)"
    bound = 1.3 * share + largest
    add(
        "load, peak above base per rank",
        f"{peak / MIB:,.0f} MiB",
        peak / bound,
        f"{limit}: {bound / MIB:,.0f} MiB",
        1.0,
    )
    theirs = s("fresh reference", "peak")
    beside(
        "load, peak above base per rank", f"{peak / MIB:,.0f} MiB", peak / theirs, f"reference: {theirs / MIB:,.0f} MiB"
    )
    return "\n".join(["| | this project | against | ratio | goal | |", "|---|---|---|---|---|---|", *rows])


def header(bench: Bench) -> str:
    """Where, when and how, in one sentence or two."""
    args = bench.args
    reference = bench.reference.framework if bench.reference else "no reference"
    when = datetime.datetime.now(tz=datetime.timezone.utc)
    return (
        f"Measured {when:%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load average {args.load:.2f} at the "
        f"start; model {args.model}, "
        f"{args.ranks} ranks, gloo, ZeRO-3, bf16 + AdamW; {reference}; medians of "
        f"{args.rounds} alternating round{'s' * (args.rounds > 1)}."
    )


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", default=str(ROOT / ".bench" / "checkpoint"), help="on the filesystem to measure; 8 GB are used"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a model of 0.1M parameters: figures mean nothing")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--reference-python", type=Path, default=ROOT / ".bench" / "reference" / "bin" / "python", help="see README.md"
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / ".bench" / "checkpoint.jsonl", help="every measurement is appended here"
    )
    args = parser.parse_args()
    args.model = "tiny" if args.small else "134m"
    if args.rounds < 1 or args.rounds % 2 == 0 or args.ranks < 1:
        parser.error("--rounds must be odd, for medians; --ranks at least 1")
    args.load = os.getloadavg()[0]
    return args


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    try:
        for job in (bench.ours, bench.reference):
            if job is not None:
                job.ask("train", steps=2)
        if "save" in args.only:  # a save and a load nobody counts: code is compiled, memory is mapped
            for turn in range(-1, args.rounds):
                bench.saves_and_loads(turn)
                if turn < 0:
                    bench.figures.clear()
        for name, work in (("hold", bench.asynchronous), ("overhead", bench.overhead)):
            for turn in range(args.rounds if name in args.only else 0):
                work(turn)
        if "drive" in args.only:
            bench.drive()
        if "memory" in args.only:
            bench.fresh()
    finally:
        bench.close()
        for name in ("ours", "reference", "torch", "dcp", "disk", "hold", "train"):
            shutil.rmtree(bench.folder / name, ignore_errors=True)
    sys.stdout.write(f"{header(bench)}\n\n{table(bench)}\n")


if __name__ == "__main__":
    main()
