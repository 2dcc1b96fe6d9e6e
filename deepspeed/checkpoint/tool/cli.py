"""``ds_checkpoint``: look into checkpoints, check them, and get them in and out. Needs no process group and no
accelerator.

    ds_checkpoint verify CKPT                         read every byte; name every damaged tensor
    ds_checkpoint info CKPT --tensors                 what is in it
    ds_checkpoint diff CKPT OTHER                     compare with a checkpoint or a model file
    ds_checkpoint diff live CKPT --model pkg:build    would it load completely into this model?
    ds_checkpoint audit CKPT                          prove that loading unpickles nothing
    ds_checkpoint export CKPT OUT --format hf         Hugging Face shards; also fp32, torch, dcp, deepspeed
    ds_checkpoint import SRC OUT                      from DeepSpeed's own layout
    ds_checkpoint prune DIR --keep-last 3             remove older ones

CKPT is a folder that holds 'latest' and tags, or a tag's folder itself.
Exit code: 0 fine, 1 a finding (damage, a difference, a pickle), 2 the command or its paths are wrong.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.checkpoint.load.reader import located
from deepspeed.checkpoint.tool import audit, diff, export, importing, info, prune, verify
from deepspeed.config.model.values import byte_count
from deepspeed.errors import CheckpointError, DeepSpeedError, UsageError

BAD_INPUT = 2
_DIFF_HELP = """Compare tensor by tensor: equal, different, missing (only in the first) or extra (only in the second).

    ds_checkpoint diff CKPT OTHER                                    OTHER: a checkpoint or a model file
    ds_checkpoint diff live CKPT --model pkg.mod:build [--config c]  the model that build() returns, and CKPT

With "live" nothing is trained, names and shapes are compared, and what agrees "fits"; values of a fresh model are
random, and those of the checkpoint are not read ("ds_checkpoint verify" does). On a running engine,
deepspeed.checkpoint.diff_live(engine, folder) compares values. A folder of the name is ./live.
Exit code: 0 no difference, 1 a difference, 2 wrong input."""


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number, at least 1, not {text!r}")
    return int(text)


def _size(text: str) -> str:
    try:
        byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_checkpoint",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *positional: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, allow_abbrev=False, help=text, description=text)
        for word in positional:
            sub.add_argument(word, metavar={"checkpoint": "CKPT"}.get(word, word.upper()))
        if name != "prune":
            sub.add_argument(
                "--tag", default=None, help="which checkpoint of the folder (default: what 'latest' names)"
            )
        return sub

    command("verify", "read every byte; check sizes, checksums and coverage", "checkpoint")
    command("info", "what a checkpoint holds", "checkpoint").add_argument(
        "--tensors", action="store_true", help="list every tensor"
    )
    two = command("diff", "compare with another checkpoint or a model file, tensor by tensor", "checkpoint", "other")
    _live_options(two)
    two.add_argument("--tag-b", default=None, help="which checkpoint of OTHER (default: as --tag)")
    two.add_argument("-q", "--quiet", action="store_true", help="only what differs")
    command("audit", "what every file is, and how many pickle opcodes loading executes", "checkpoint")
    _export_options(command("export", "write the weights, or everything, for other programs", "checkpoint", "out"))
    into = command("import", "write a checkpoint in DeepSpeed's layout as one of this package's", "source", "out")
    into.add_argument("--as", dest="as_tag", default=None, metavar="TAG", help="its tag in OUT (default: as in SOURCE)")
    old = command("prune", "remove older complete checkpoints, never the one 'latest' names", "folder")
    old.add_argument("--keep-last", type=_count, required=True, metavar="N", help="how many of the newest stay")
    old.add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser


def _live_options(parser: argparse.ArgumentParser) -> None:
    parser.description = _DIFF_HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--model",
        metavar="MODULE:BUILD",
        help="live: a function that returns the model, or a tuple that begins with it",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="live: also compare the state that the optimizer of this configuration keeps"
    )
    parser.add_argument(
        "--values", action="store_true", help="live: also compare values of weights, for a build() that loads them"
    )


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format", choices=export.FORMATS, required=True, help="hf: safetensors; fp32: as zero_to_fp32.py; torch: .bin"
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(export.DTYPES),
        default=None,
        help="of the weights (default keep: what training computes in)",
    )
    parser.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="most bytes of one file (default 5GB)"
    )
    parser.add_argument(
        "--stage",
        dest="zero",
        type=int,
        choices=(0, 1, 2, 3),
        default=None,
        help="deepspeed: its layout (default: as saved)",
    )
    parser.add_argument("--world", type=_count, default=None, metavar="N", help="deepspeed: ranks (default: as saved)")
    parser.add_argument("--exclude-frozen", action="store_true", help="leave frozen weights out")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="dcp, deepspeed: unpickle client state, which can run any code"
    )
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")


def _run(args: argparse.Namespace) -> int:
    if args.command == "prune":
        return prune.run(Path(args.folder), args.keep_last, dry_run=args.dry_run)
    if args.command == "import":
        return importing.run(Path(args.source), Path(args.out), tag=args.tag, as_tag=args.as_tag)
    if args.command == "export":
        return export.run(args)
    path = Path(args.checkpoint)
    if args.command == "info":
        return info.run(path, args.tag, tensors=args.tensors)
    if args.command == "diff":
        if args.checkpoint == "live":
            return _diff_live(args)
        if args.model or args.config or args.values:
            raise UsageError("--model, --config and --values belong to: ds_checkpoint diff live CKPT")
        if not Path(args.other).exists():
            raise CheckpointError(f"there is no {args.other}")
        return diff.run(path, Path(args.other), tag=args.tag, tag_b=args.tag_b, quiet=args.quiet)
    return {"verify": verify.run, "audit": audit.run}[args.command](located(path, args.tag))


def _diff_live(args: argparse.Namespace) -> int:
    from deepspeed.checkpoint.tool import live  # noqa: PLC0415 - the only command that needs the whole package

    if not args.model:
        raise UsageError(
            "diff live needs --model MODULE:BUILD, a function that returns the model; a folder of that name is ./live"
        )
    return live.run(
        Path(args.other),
        args.model,
        config=args.config,
        tag=args.tag_b or args.tag,
        values=args.values,
        quiet=args.quiet,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see the exit codes above."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what the terminal cannot show
    try:
        status = _run(args)
        sys.stdout.flush()
        return status
    except (DeepSpeedError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader left. Without this the interpreter would complain once more when it closes the streams.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        sys.stderr.write(f"ds_checkpoint: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("ds_checkpoint: interrupted; nothing half-written is left\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
