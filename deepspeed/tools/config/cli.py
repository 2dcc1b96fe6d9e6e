"""The ``ds_config`` command: check a configuration, show what it comes to, or start one. Imports no torch."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.config.explain.check import Findings, as_json, dtypes_text, examine, values_text
from deepspeed.config.model.values import BATCH_KEYS
from deepspeed.config.parse import read_source, text_source
from deepspeed.errors import DeepSpeedConfigError, UsageError, counted
from deepspeed.monitor.program import BAD_INPUT, CommandLine, count_of, guarded, say

STARTERS = Path(__file__).parent / "starters"  # what ``ds_config init`` writes, one per goal


def build_parser() -> argparse.ArgumentParser:
    about = "Check, explain and start training configurations."
    parser = CommandLine(prog="ds_config", allow_abbrev=False, description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", allow_abbrev=False, help="say everything that is wrong; exit status 0 or 2")
    check.switches(resolved='no value may be left "auto"')
    show = commands.add_parser("show", allow_abbrev=False, help="every final value and where it comes from")
    show.switches(
        dtypes="accepted: the table of dtypes is always shown",
        json="for programs",
        all="also the keys of blocks that are off",
    )
    for command, count in ((check, "+"), (show, 1)):
        text = "JSON with comments allowed; - reads standard input"
        command.add_argument("files", nargs=count, metavar="FILE", help=text)
        command.add_argument("--world", type=count_of, metavar="N", help="ranks (default: one data-parallel rank)")
    init = commands.add_parser("init", allow_abbrev=False, help="a commented file to start from")
    goals, text = sorted(path.stem for path in STARTERS.glob("*.json")), "what the training is for (default: finetune)"
    init.add_argument("--goal", choices=goals, default="finetune", help=text)
    init.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    init.switches(force="replace FILE when it is there")
    return parser


def _examined(name: str, args: argparse.Namespace, *, resolved: bool = False) -> Findings | None:
    """Return the findings about file ``name`` (never base64); None where faults went to standard error, a line each."""
    try:
        if name == "-":
            source = text_source(sys.stdin.buffer.read(), "standard input")
        elif name and os.path.lexists(name):
            source = read_source(Path(name))
        else:
            raise DeepSpeedConfigError(f"no such file (working directory {os.getcwd()})")
        return examine(source, world_size=args.world, resolved=resolved)
    except DeepSpeedConfigError as error:
        for fault in error.faults or (str(error),):
            about_ranks = args.world is None and re.search(r"\d+ (data-parallel )?ranks\b|world_size", fault)
            hint = " Checked for 1 rank: give the number of ranks with --world N." if about_ranks else ""
            text = re.sub(r"^(configuration (file|path) (['\"]).*?\3|standard input):? ", "", fault)
            sys.stderr.write(f"{name}: {text}{hint}\n")
    return None


def _summary(findings: Findings) -> str:
    config, written = findings.config, [item for item in findings.settings.values() if item.origin in ("file", "auto")]
    sizes = f"{config.train_micro_batch_size_per_gpu} x {config.gradient_accumulation_steps} x {config.world_size}"
    is_open = any(path in findings.autos for path in BATCH_KEYS)
    batch = "batch sizes open" if is_open else f"batch {config.train_batch_size} = {sizes}"
    return f"ok ({counted(len(written), 'key')}, ZeRO stage {config.zero_stage}, {config.compute_dtype}, {batch})"


def _check(args: argparse.Namespace) -> int:
    status = 0
    for name in args.files:
        findings = _examined(name, args, resolved=args.resolved)
        if findings is None:
            status = BAD_INPUT
            continue
        notes = list(findings.notes)
        if findings.autos:
            count = f'{len(findings.autos)} values are "auto"' if len(findings.autos) > 1 else '1 value is "auto"'
            why = "an integration (Transformers, Accelerate) must fill them"
            notes.insert(0, f"{count}; {why}: {', '.join(findings.autos)}")
        say("\n".join([f"{name}: {_summary(findings)}", *(f"{name}: note: {note}" for note in notes)]))
    return status


def _show(args: argparse.Namespace) -> int | str | dict[str, Any]:
    (name,) = args.files
    findings = _examined(name, args)
    if findings is None:
        return BAD_INPUT
    if args.json:
        return as_json(findings)
    table, dtypes = values_text(findings, everything=args.all), f"dtypes\n{dtypes_text(findings)}"
    notes = ["", *(f"note: {note}" for note in findings.notes)] if findings.notes else []
    return "\n".join([f"{name}: {_summary(findings)}", "", table, "", dtypes, *notes])


def _init(args: argparse.Namespace) -> int:
    text = (STARTERS / f"{args.goal}.json").read_text(encoding="utf-8")
    if args.output is None:
        sys.stdout.write(text)
        return 0
    try:
        with open(args.output, "w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{args.output} is there already; --force replaces it") from None
    say(f"wrote {args.output}; next: ds_config check {args.output} --world RANKS")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0, or 2 for faults and wrong usage."""
    args = build_parser().parse_args(argv)
    return guarded("ds_config", lambda: {"check": _check, "show": _show, "init": _init}[args.command](args))


if __name__ == "__main__":
    sys.exit(main())
