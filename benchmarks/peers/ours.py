"""This project, at --level 0 to 3."""

import argparse

from engine import build_step, init_group
from measure import Step, run
from models import Workload

import deepspeed


def build(args: argparse.Namespace, workload: Workload) -> Step:
    """The engine's step."""
    return build_step(deepspeed, args, workload)


if __name__ == "__main__":
    init_group(deepspeed)
    run("ours", build, framework=f"this project {deepspeed.__version__}")
