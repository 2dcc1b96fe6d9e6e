"""The ``ds_config`` command: check a configuration, show what it comes to, or start one. Imports no torch."""

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.config.explain.check import Findings, batch_is_open, examine
from deepspeed.config.explain.show import as_json, dtypes_text, shown_settings, values_text
from deepspeed.config.parse import ConfigSource, read_source, text_source
from deepspeed.config.tool.starters import GOALS, starter
from deepspeed.errors import DeepSpeedConfigError

FAULTY = 2


def _world(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of ranks, at least 1, not {text!r}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the three subcommands."""
    about = "Check, explain and start training configurations."
    parser = argparse.ArgumentParser(prog="ds_config", allow_abbrev=False, description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", allow_abbrev=False, help="say everything that is wrong; exit status 0 or 2")
    check.add_argument("files", nargs="+", metavar="FILE", help="JSON with comments allowed; - reads standard input")
    check.add_argument("--resolved", action="store_true", help='no value may be left "auto"')
    show = commands.add_parser("show", allow_abbrev=False, help="every final value and where it comes from")
    show.add_argument("files", nargs=1, metavar="FILE", help="JSON with comments allowed; - reads standard input")
    show.add_argument("--dtypes", action="store_true", help="only the table of dtypes")
    show.add_argument("--json", action="store_true", help="for programs")
    show.add_argument("--all", action="store_true", help="also the keys of blocks that are off")
    for command in (check, show):
        command.add_argument("--world", type=_world, metavar="N", help="data-parallel ranks (default: 1)")
    init = commands.add_parser("init", allow_abbrev=False, help="a commented file to start from")
    text = "what the training is for (default: finetune)"
    init.add_argument("--goal", choices=sorted(GOALS), default="finetune", help=text)
    init.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    init.add_argument("--force", action="store_true", help="replace FILE when it is there")
    return parser


def _read(name: str) -> ConfigSource:
    """The source called ``name`` on the command line; only a file or standard input, never base64."""
    if name == "-":
        return text_source(sys.stdin.buffer.read(), "standard input")
    if not name or not os.path.lexists(name):
        raise DeepSpeedConfigError(f"no such file (working directory {os.getcwd()})")
    return read_source(Path(name))


def _examined(name: str, args: argparse.Namespace, *, resolved: bool) -> Findings:
    """The findings about file ``name``; a source that cannot be read at all is a finding too."""
    try:
        source = _read(name)
    except DeepSpeedConfigError as error:
        sentence = re.sub(r"^(configuration (file|path) (['\"]).*?\3|standard input):? ", "", str(error))
        return Findings(ConfigSource({}, name, from_program=False), None, (sentence,))
    return examine(source, world_size=args.world or 1, resolved=resolved)


def _say(name: str, findings: Findings, *, guessed_world: bool) -> None:
    """The faults, one line each, to standard error."""
    for fault in findings.faults:
        about_ranks = guessed_world and re.search(r"\d+ (data-parallel )?ranks\b|world_size", fault)
        hint = " Checked for 1 rank: give the number of data-parallel ranks with --world N." if about_ranks else ""
        text = fault.removeprefix(f"{findings.source.name}: ").removeprefix(f"{findings.source.name} ")
        sys.stderr.write(f"{name}: {text}{hint}\n")


def _summary(findings: Findings, *, world: int) -> str:
    config = findings.config
    assert config is not None, "a summary needs a configuration"
    written = sum(1 for item in shown_settings(findings).values() if item.origin in ("file", "auto"))
    batch = (
        f"batch {config.train_batch_size} = {config.train_micro_batch_size_per_gpu} x "
        f"{config.gradient_accumulation_steps} x {world}"
    )
    sizes = "batch sizes open" if batch_is_open(findings) else batch
    keys = f"{written} key{'s' if written != 1 else ''}"
    return f"ok ({keys}, ZeRO stage {config.zero_stage}, {config.compute_dtype}, {sizes})"


def _check(args: argparse.Namespace) -> int:
    status = 0
    for name in args.files:
        findings = _examined(name, args, resolved=args.resolved)
        if findings.config is None:
            _say(name, findings, guessed_world=args.world is None)
            status = FAULTY
            continue
        sys.stdout.write(f"{name}: {_summary(findings, world=args.world or 1)}\n")
        if findings.autos:
            count = f'{len(findings.autos)} values are "auto"' if len(findings.autos) > 1 else '1 value is "auto"'
            why = "an integration (Transformers, Accelerate) must fill them"
            sys.stdout.write(f"{name}: note: {count}; {why}: {', '.join(findings.autos)}\n")
        for note in findings.notes:
            sys.stdout.write(f"{name}: note: {note}\n")
    return status


def _show(args: argparse.Namespace) -> int:
    (name,) = args.files
    findings = _examined(name, args, resolved=False)
    if findings.config is None:
        _say(name, findings, guessed_world=args.world is None)
        return FAULTY
    if args.json:
        sys.stdout.write(json.dumps(as_json(findings), indent=1, default=str) + "\n")
    elif args.dtypes:
        sys.stdout.write(dtypes_text(findings) + "\n")
    else:
        sys.stdout.write(
            f"{name}: {_summary(findings, world=args.world or 1)}\n\n{values_text(findings, everything=args.all)}\n"
        )
        sys.stdout.write(f"\ndtypes\n{dtypes_text(findings)}\n")
        sys.stdout.write("".join(f"\nnote: {note}" for note in findings.notes) + ("\n" if findings.notes else ""))
    return 0


def _init(args: argparse.Namespace) -> int:
    text = starter(args.goal)
    if args.output is None:
        sys.stdout.write(text)
        return 0
    try:
        with open(args.output, "w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        sys.stderr.write(f"{args.output} is there already; --force replaces it\n")
        return FAULTY
    except OSError as error:
        sys.stderr.write(f"{args.output} cannot be written: {error.strerror or error}\n")
        return FAULTY
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 2 for faults and wrong usage."""
    args = build_parser().parse_args(argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the program
            setattr(sys, name, io.StringIO())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names and keys may hold what the terminal cannot show
    try:
        status = {"check": _check, "show": _show, "init": _init}[args.command](args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left. Without this the interpreter would complain once more when it closes the streams.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
