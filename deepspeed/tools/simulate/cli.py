"""``ds_simulate``: what a step would take on GPUs that are not here. The real engine runs in this one process, without
data and without a device, and every operation is recorded.

    ds_simulate --model config.json --config ds_config.json --gpus 8
    ds_simulate --model my_model:build --config ds_config.json --gpus 512 --device h100 --trace step.json
    ds_simulate ... --max-memory 70G --max-exposed 5% --no-sync     a gate for CI
    deepspeed --no_python ds_simulate --calibrate FILE              this machine's constants, for --device

Out come the memory of one rank by category, the time of a step with what is exposed of its transfers, and every place
where the program waits for the device. With pipeline.stages one rank of each stage is simulated, of a model that is cut
by its blocks unless build() returns a PipelineModule. Times rest on the constants of --device; docs/simulator.md says
how far they can be trusted. --calibrate measures them on as many ranks as it is started on.

Exit code: 0 all is well, 1 an access without order or a limit that is passed, 2 the command or its files are wrong or
the model does not fit, 130 after Ctrl-C.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed.config import load_config
from deepspeed.config.parse import read_config_source
from deepspeed.errors import UsageError
from deepspeed.monitor.program import CommandLine, count_of, guarded, number_of, say, whole_of
from deepspeed.tools.bench.common import size_of
from deepspeed.tools.simulate.costs import load_machine, machines


def _share_of(text: str) -> float:
    """Parse a share: ``5%`` or ``0.05``."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write 5% or 0.05")
    return share


def _parser() -> CommandLine:
    parser = CommandLine(prog="ds_simulate", description=__doc__)
    parser.option("--model", str, None, "M", "module:build, or a Hugging Face config.json")
    parser.option("--config", str, None, "FILE", "the DeepSpeed configuration")
    parser.option("--gpus", count_of, 8, "N", "devices of the job")
    parser.option("--rank", whole_of, 0, "R", "the rank to be simulated")
    parser.option("--device", str, "h100", "D", f"{', '.join(machines())} or a JSON file")
    parser.option("--sequence", count_of, None, "N", "tokens of a sample, for a config.json")
    parser.option("--steps", count_of, 5, "N", "steps, of which the last is reported")
    parser.option("--skew", number_of, 1.0, "F", "tokens of the rank's experts, in even shares")
    parser.option("--trace", str, None, "FILE", "write the last step for ui.perfetto.dev")
    parser.option("--max-memory", size_of, None, "SIZE", "exit 1 where the device needs more")
    parser.option("--max-exposed", _share_of, None, "SHARE", "exit 1 where more of the step is exposed transfers")
    parser.option("--calibrate", Path, None, "FILE", "measure this machine, write its constants to FILE, and end")
    parser.option("--drive", str, None, "FOLDER", "with --calibrate: measure the drive of this folder too")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the launcher gives it, and LOCAL_RANK too
    texts = {
        "no-sync": "exit 1 where the program waits for the device",
        "recompute": "activation checkpointing of every block, for a config.json",
        "no-init": "build the model whole also at stage 3, not under zero.Init",
        "json": "print facts as JSON",
    }
    parser.switches(**texts)
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError for options that do not go together."""
    if not 0 <= options.rank < options.gpus:
        raise UsageError(f"--rank {options.rank} is not one of {options.gpus} ranks, 0 to {options.gpus - 1}")
    if options.trace is not None and not Path(options.trace).absolute().parent.is_dir():
        raise UsageError(f"--trace {options.trace}: there is no such folder")
    if options.trace is not None and Path(options.trace).is_dir():
        raise UsageError(f"--trace {options.trace}: this is a folder; name a file")
    if not options.model.endswith(".json") and (options.sequence is not None or options.recompute):
        raise UsageError("--sequence and --recompute are for a config.json; build() of your own model decides there")


def _run(options: argparse.Namespace) -> int:
    _check(options)
    source = read_config_source(options.config)
    from deepspeed.tools.simulate import report
    from deepspeed.tools.simulate.models import subject_of
    from deepspeed.tools.simulate.pipeline.run import simulate_pipeline, ways_of
    from deepspeed.tools.simulate.run import RankJob, run_job

    depth = ways_of(source, options.gpus)
    machine, config = load_machine(options.device), load_config(options.config, world_size=options.gpus // depth)
    samples = config.train_micro_batch_size_per_gpu
    make = functools.partial(
        subject_of, options.model, samples=samples, sequence=options.sequence, recompute=options.recompute
    )
    sharded = False if options.no_init else None
    job = RankJob(config.source, machine, options.gpus, options.rank, options.trace is not None, sharded, options.steps)
    job = replace(job, skew=options.skew)
    subject = make()
    if depth > 1:
        whole = simulate_pipeline(make, job)
        text, outcomes = report.pipeline_text(whole, machine, subject.name), whole.steps
        facts = report.pipeline_facts(whole, machine)
        names = [f"stage {place}: " for place in range(depth)]
    else:
        outcome = run_job(job, subject)
        where = f"rank {options.rank} of {options.gpus} on {machine.name}"
        title = f"{subject.name}, {outcome.parameters:,} parameters, {where}"
        text, facts = report.text(outcome, machine, title), report.facts(outcome, machine)
        outcomes, names = [outcome], [""]
    if options.trace is not None:
        report.write_trace(outcomes, names if depth > 1 else ["one rank"], options.trace)
    say(json.dumps(facts, indent=1) if options.json else text)
    failures = [text for one, who in zip(outcomes, names, strict=True) for text in report.failures(one, options, who)]
    for failure in failures:
        sys.stderr.write(f"ds_simulate: {failure}\n")
    if failures:
        return 1
    if (over := max(outcome.reserved for outcome in outcomes) - machine["device_bytes"]) <= 0:
        return 0
    if options.json:
        sys.stderr.write(f"ds_simulate: the model does not fit: {over:,.0f} bytes more than the device has\n")
    return 2


def _calibrate(options: argparse.Namespace) -> int:
    from deepspeed.tools.simulate import report
    from deepspeed.tools.simulate.calibrate.run import calibrate

    document = calibrate(options.calibrate, folder=options.drive)
    if document is None:  # not the rank that writes
        return 0
    say(json.dumps(document, indent=1) if options.json else "\n".join(report.constants(document)))
    if not options.json:
        say(f"{options.calibrate} is written; use it as --device {options.calibrate}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.calibrate is not None:
        given = [name for name, value in vars(options).items() if value != parser.get_default(name)]
        extra = [
            f"--{name.replace('_', '-')}" for name in given if name not in ("calibrate", "drive", "json", "local_rank")
        ]
        if extra:
            parser.error(f"--calibrate measures this machine and simulates nothing; leave out {', '.join(extra)}")
        return guarded("ds_simulate", lambda: _calibrate(options))
    if options.drive is not None:
        parser.error("--drive is a part of --calibrate FILE")
    if missing := [f"--{name}" for name in ("model", "config") if getattr(options, name) is None]:
        parser.error(f"{' and '.join(missing)} must be given, or --calibrate FILE")
    return guarded("ds_simulate", lambda: _run(options))


if __name__ == "__main__":
    sys.exit(main())
