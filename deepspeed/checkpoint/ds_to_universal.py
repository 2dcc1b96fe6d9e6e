"""``ds_to_universal``, for scripts that call it: every checkpoint loads at any world size without a conversion."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.checkpoint.foreign.rewrite import write_checkpoint
from deepspeed.checkpoint.format.folders import LATEST_UNIVERSAL, write_atomically
from deepspeed.checkpoint.load.reader import open_checkpoint
from deepspeed.monitor.log import logger
from deepspeed.monitor.program import guarded


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; options about workers, intermediate files and strictness have no effect."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description=__doc__)
    parser.add_argument("--input_folder", required=True, help="a tag's folder")
    parser.add_argument("--output_folder", required=True, help="the folder to write")
    for option, default in (("--num_extract_workers", 4), ("--num_merge_workers", 2)):
        parser.add_argument(option, type=int, default=default, help="no effect")
    for option in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(option, action="store_true", help="no effect")
    return parser.parse_args(argv)


def main(args: argparse.Namespace | None = None) -> int:
    """Write ``input_folder`` as this package's checkpoint to ``output_folder``, and ``latest_universal``; return 0."""
    args = parse_arguments() if args is None else args
    out = Path(args.output_folder)
    with contextlib.closing(open_checkpoint(Path(args.input_folder))) as source:
        if source.kind == "deepspeed-checkpoint":
            logger.warning("%s loads at any world size as it is; converting it only makes a copy", source.path)
        write_checkpoint(source, out.parent, out.name, latest=False)
    write_atomically(out.parent / LATEST_UNIVERSAL, out.name.encode())
    return 0


if __name__ == "__main__":
    sys.exit(guarded("ds_to_universal", main))
