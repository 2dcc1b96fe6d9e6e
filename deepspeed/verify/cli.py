"""``ds_verify``: check on this machine's CPU that sharded training computes what plain PyTorch computes, wherever
states rest.

    ds_verify grads                                     stage 0-3 on a small built-in model
    ds_verify grads --matrix                            stage x bucket x overlap x accumulation x model
    ds_verify grads --model my_model:build --config ds_config.json     your model under your configuration
    ds_verify offload                                   device, cpu and nvme agree bit for bit on a small built-in model
    ds_verify offload --model my_model:build --config ds_config.json --folder /drive     on yours, on your drive
    ds_verify data --save-n 4 --load-n 3 --workers 2    an epoch resumed on other ranks: no sample twice, none missing
    ds_verify resume --steps 20 --at 10                 saved, ended and loaded training goes on bit for bit
    ds_verify resume --ranks 4 --load-ranks 3           the state survives a change of the number of ranks
    ds_verify crash --kills 200                         killed while saving: every resume finds a whole checkpoint

Exit code: 0 all cells pass, 1 some cell fails, 2 the command or its files are wrong.
"""

import argparse
import sys
from collections.abc import Sequence

from deepspeed.verify import crash, data, grads, offload, resume

BAD_INPUT = 2
_COMMANDS = {"grads": grads, "offload": offload, "data": data, "resume": resume, "crash": crash}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``ds_verify``; returns the exit code."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="ds_verify", description=__doc__, formatter_class=kind)
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(_COMMANDS)}}}")
    for module in _COMMANDS.values():
        module.add_parser(commands)
    options = parser.parse_args(argv)
    try:
        return _COMMANDS[options.command].run(options, sys.stdout)
    except ValueError as error:  # DeepSpeedConfigError is one
        sys.stderr.write(f"ds_verify: {error}\n")
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
