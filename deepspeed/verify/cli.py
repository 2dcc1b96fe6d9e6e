"""``ds_verify``: check on this machine's CPU that sharded training computes what plain PyTorch computes, wherever
states rest.

    ds_verify grads                                     stage 0-3 on a small built-in model
    ds_verify grads --matrix                            stage x bucket x overlap x accumulation x model
    ds_verify grads --model my_model:build --config ds_config.json     your model under your configuration
    ds_verify loop                                      accumulation by hand, no_sync, two losses, penalties: any loop
    ds_verify gas                                       a global batch split over ranks and micro-batches: one gradient
    ds_verify optim                                     every optimizer, each group with its own rate and decay
    ds_verify lr                                        the rate counts updates: not ranks, micro-batches or skips
    ds_verify teardown --cycles 50                      a destroyed engine leaves neither memory nor hooks
    ds_verify compile                                   blocks compiled by inductor train alike, each as one graph
    ds_verify offload                                   device, cpu and nvme agree bit for bit on a small built-in model
    ds_verify offload --model my_model:build --config ds_config.json --folder /drive     on yours, on your drive
    ds_verify data --save-n 4 --load-n 3 --workers 2    an epoch resumed on other ranks: no sample twice, none missing
    ds_verify resume --steps 20 --at 10                 saved, ended and loaded training goes on bit for bit
    ds_verify resume --ranks 4 --load-ranks 3           the state survives a change of the number of ranks
    ds_verify crash --kills 200                         killed while saving: every resume finds a whole checkpoint
    ds_verify schedule --schedule zero_bubble           what the ranks of a pipeline do when, and how long they wait
    ds_verify 3d --matrix                               pipeline x tensor x data parallel x ZeRO against one process
    ds_verify 3d --checkpoints                          saved at one layout, loaded at others and back

Exit code: 0 all cells pass, 1 some cell fails, 2 the command or its files are wrong, 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence

from deepspeed.observe.program import CommandLine, guarded
from deepspeed.verify import compiled, crash, data, grads, offload, resume, schedule, three_axes, user_model
from deepspeed.verify.common import Finding, Printout
from deepspeed.verify.ranks import RankFailure
from deepspeed.verify.training import gas, loop, lr, optim, teardown

_COMMANDS = {
    "grads": (grads, "compare gradients, norms and parameters with plain one-process PyTorch"),
    "loop": (loop, "compare shapes of the training loop with plain one-process PyTorch"),
    "gas": (gas, "compare splits of a global batch with the whole batch in one process"),
    "optim": (optim, "compare optimizers and their groups with the same ones unsharded"),
    "lr": (lr, "compare the learning rates of a run with plain PyTorch"),
    "teardown": (teardown, "count what is left of engines that were destroyed"),
    "compile": (compiled, "compare compiled blocks with plain PyTorch; count graph breaks and recompilations"),
    "offload": (offload, "compare training with states on the device, in host memory and on a drive, bit for bit"),
    "data": (data, "count the samples of an epoch that is saved on some ranks and resumed on others"),
    "resume": (resume, "compare training that is saved and resumed with training in one go, bit for bit"),
    "crash": (crash, "kill a job at random instants of its saves; every resume must find a whole checkpoint"),
    "schedule": (schedule, "draw the schedule of a pipeline, with its bubble"),
    "3d": (three_axes, "compare pipelines of tensor-parallel parts beside ZeRO with plain one-process PyTorch"),
}


def _run(options: argparse.Namespace) -> int:
    report = Printout(sys.stdout)
    try:
        return _COMMANDS[options.command][0].run(options, report)
    except (Finding, RankFailure) as failure:
        report.say(f"{failure}\nFAIL")
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandLine(prog="ds_verify", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(_COMMANDS)}}}")
    for name, (module, text) in _COMMANDS.items():
        about = user_model.__doc__ if module is grads else module.__doc__
        module.add_options(commands.add_parser(name, help=text, description=about))
    options = parser.parse_args(argv)
    return guarded("ds_verify", lambda: _run(options))


if __name__ == "__main__":
    sys.exit(main())
