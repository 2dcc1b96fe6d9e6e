"""The reference DeepSpeed, run by the interpreter of its own environment; refuses to run with this project's tree in
its place.
"""

import argparse
from pathlib import Path

from engine import build_step, init_group
from measure import Step, run
from models import Workload

import deepspeed


def build(args: argparse.Namespace, workload: Workload) -> Step:
    """The engine's step. From a drive parameters come one by one: with its default look-ahead 0.19.8 stops with an
    assertion here.
    """
    args.prefetch = 0 if args.variant.startswith("nvme") else None
    return build_step(deepspeed, args, workload)


if __name__ == "__main__":
    if Path(deepspeed.__file__).resolve().is_relative_to(Path(__file__).resolve().parents[2]):
        raise SystemExit(
            "reference: this project was imported in its place; use the interpreter of its own environment and "
            "no PYTHONPATH"
        )
    init_group(deepspeed)
    run("reference", build, framework=f"DeepSpeed {deepspeed.__version__}")
