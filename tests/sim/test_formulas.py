"""What a simulated step launches beside the formulas that people reckon with: a decoder's arithmetic, the bytes of its
gathers and reductions, and its model states.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any
from unittest.mock import patch

from deepspeed.tools.simulate import run
from deepspeed.tools.simulate.costs import load_machine
from deepspeed.tools.simulate.events import Event, Launch
from deepspeed.tools.simulate.models import Shape, decoder_subject
from tests.sim.test_matrix import ROOT

SHAPE = Shape(
    width=128, blocks=3, heads=4, inner=320, vocabulary=500, positions=64, key_heads=2, gated=True, head=48
)  # fmt: skip
SAMPLES, SEQUENCE, WORLD = 2, 64, 12
CONFIG = {
    "train_micro_batch_size_per_gpu": SAMPLES,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def counted() -> dict[str, float]:
    """Operations and bytes by kind of the last of four steps. In a process of its own."""
    events: list[Event] = []
    plain = run.recording

    @contextlib.contextmanager
    def recorded(*args: Any, **options: Any) -> Any:
        with plain(*args, **options) as recorder:
            recorder.listeners.append(events.append)
            restart = recorder.timeline.restart
            recorder.timeline.restart = lambda: (events.clear(), restart())  # type: ignore[func-returns-value]
            yield recorder

    subject = decoder_subject("a decoder", SHAPE, samples=SAMPLES, sequence=SEQUENCE, recompute=False)
    with patch.object(run, "recording", recorded):
        outcome = run.simulate(subject, CONFIG, load_machine("h100"), world=WORLD, steps=4)
    sums = Counter[str]()
    for event in events:
        if isinstance(event, Launch):
            sums[event.work.kind] += event.work.flops  # type: ignore[assignment]
            sums[event.name] += event.work.nbytes if event.work.kind == "collective" else 0
    return {**sums, "parameters": outcome.parameters, "states": outcome.states}


def test_a_decoder_s_step_is_what_the_formulas_say() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import json; from tests.sim import test_formulas as t\n"
         "print(json.dumps(t.counted()))"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    tokens, wide, narrow = SAMPLES * SEQUENCE, 4 * 48, 2 * 48
    block = 2 * 128 * wide + 2 * 128 * narrow + 3 * 128 * 320
    products, table = 3 * block + 128 * 500, 128 * 500
    parameters = products + table + (2 * 3 + 1) * 128
    assert found["parameters"] == parameters
    assert found["matmul"] == 6 * products * tokens  # 2 forward, 4 backward, for each weight and token
    assert found["attention"] == 7 * 3 * 4 * 48 * SAMPLES * SEQUENCE**2  # 4 forward and 10 backward, of half the square
    # in 16 bits: gradients once; weights twice, but for what the backward begins with, which stays. Padding: 12 ranks.
    padding = 12 * 2 * 100
    assert 2 * parameters <= found["reduce_scatter"] <= 2 * parameters + padding
    assert 2 * parameters + 2 * 3 * block <= found["all_gather"] <= 4 * parameters + padding
    # weight 2, gradient 4, fp32 weight and two moments 12
    assert 18 * parameters / WORLD <= found["states"] <= 18 * (parameters + padding) / WORLD + 4096
