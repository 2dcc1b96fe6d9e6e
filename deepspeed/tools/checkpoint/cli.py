"""``ds_checkpoint``: look into checkpoints, check them, get them in and out. Needs no process group or device.

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
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from deepspeed.checkpoint.format import folders
from deepspeed.config.model.values import DTYPE_NAMES, byte_count
from deepspeed.errors import CheckpointError
from deepspeed.monitor.program import CommandLine, count_of, guarded, say, size

FORMATS = ("hf", "fp32", "dcp", "deepspeed", "torch")
_DIFF_HELP = """Compare tensor by tensor: equal, different, missing (only in the first) or extra (only in the second).

    ds_checkpoint diff CKPT OTHER                                    OTHER: a checkpoint or a model file
    ds_checkpoint diff live CKPT --model pkg.mod:build [--config c]  the model that build() returns, and CKPT

With "live" nothing is trained, names and shapes are compared, and what agrees "fits"; values of a fresh model are
random, and those of the checkpoint are not read ("ds_checkpoint verify" does). On a running engine,
deepspeed.checkpoint.diff_live(engine, folder) compares values. A folder of the name is ./live."""


def _size(text: str) -> int:
    try:
        return byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = CommandLine(prog="ds_checkpoint", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: str, text: str, *positional: str) -> Callable[..., object]:
        description = _DIFF_HELP if name == "diff" else text
        sub = commands.add_parser(name, help=text, description=description, allow_abbrev=False)
        sub.set_defaults(run=run)
        for word in positional:
            sub.add_argument(word, metavar="CKPT" if word == "checkpoint" else word.upper())
        if name != "prune":
            sub.add_argument("--tag", help="which checkpoint of the folder (default: what 'latest' names)")
        return sub.add_argument

    command("verify", "verify.run", "read every byte; check sizes, checksums and coverage", "checkpoint")
    add = command("info", "info.run", "what a checkpoint holds", "checkpoint")
    add("--tensors", action="store_true", help="list every tensor")
    add = command("diff", "diff.run", "compare with a checkpoint or a file, tensor by tensor", "checkpoint", "other")
    add("--model", metavar="MODULE:BUILD", help="live: a function that returns the model, or a tuple it begins")
    add("--config", metavar="FILE", help="live: also compare the state that the optimizer of this file keeps")
    add("--values", action="store_true", help="live: also compare values of weights, for a build() that loads them")
    add("--tag-b", help="which checkpoint of OTHER (default: as --tag)")
    add("-q", "--quiet", action="store_true", help="only what differs")
    command("audit", "info.audit", "what every file is, and how many pickle opcodes loading executes", "checkpoint")
    add = command("export", "export.run", "write the weights, or everything, for other programs", "checkpoint", "out")
    add("--format", choices=FORMATS, required=True, help="hf: safetensors; fp32: as zero_to_fp32; torch: .bin")
    dtypes = sorted([*DTYPE_NAMES, "keep"])
    add("--dtype", choices=dtypes, help="of the weights (default keep: the run's, one for all that it trains)")
    add("--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="most bytes of one file (default 5GB)")
    add("--stage", dest="zero", type=int, choices=(0, 1, 2, 3), help="deepspeed: its layout (default: as saved)")
    add("--world", type=count_of, metavar="N", help="deepspeed: ranks (default: as saved)")
    add("--exclude-frozen", action="store_true", help="leave frozen weights out")
    add("--allow-pickle", action="store_true", help="dcp, deepspeed: unpickle client state, which can run any code")
    add("--overwrite", action="store_true", help="write into a folder that is not empty")
    add = command("import", "export.run_import", "write DeepSpeed's layout as one of this package's", "source", "out")
    add("--as", dest="as_tag", metavar="TAG", help="its tag in OUT (default: as in SOURCE)")
    add = command("prune", "cli.prune", "remove older complete checkpoints, never the one 'latest' names", "folder")
    add("--keep-last", type=count_of, required=True, metavar="N", help="how many of the newest stay")
    add("--dry-run", action="store_true", help="only say what would go")
    return parser


def prune(args: argparse.Namespace) -> int:
    """Remove older complete checkpoints and leftovers of saves that died, print which, and return 0."""
    folder = Path(args.folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    if folders.is_complete(folder):
        raise CheckpointError(f"{folder} is itself a checkpoint; name the folder that holds the checkpoints")
    if not args.dry_run:
        folders.repair(folder)
    stale, complete, named = folders.left_behind(folder), folders.complete_tags(folder), folders.read_latest(folder)
    if not complete and not stale:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    gone = [path for path in complete[args.keep_last :] if path.name != named]
    files = (file for path in [*gone, *stale] for file in path.rglob("*") if file.is_file())
    total, verb = sum(file.lstat().st_size for file in files), "would remove" if args.dry_run else "removed"
    tags = [path.name for path in gone]
    for path in () if args.dry_run else (*gone, *stale):
        folders.discard(path)
        if path.exists():
            raise CheckpointError(f"{path} cannot be removed: it is another user's, or the drive is read-only")
    for label in [*tags, *(f"{path.name}, left behind by a save that died" for path in stale)]:
        say(f"{verb} {label}")
    kept = [path.name for path in complete if path.name not in tags]
    say(f"{verb} {size(total)}; kept: {', '.join(kept) or 'none'}")
    return 0


def _run(args: argparse.Namespace) -> int:
    """Import the command's module, and torch with it, and run it. CheckpointError before, where no checkpoint is."""
    path = getattr(args, "source", getattr(args, "checkpoint", args.run))
    if path not in ("live", args.run) and not Path(path).exists():
        raise CheckpointError(f"there is no checkpoint in {path} (no such folder)")
    module, _, function = args.run.partition(".")
    return int(getattr(import_module(f"deepspeed.tools.checkpoint.{module}"), function)(args))


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return guarded("ds_checkpoint", lambda: _run(args))


if __name__ == "__main__":
    sys.exit(main())
