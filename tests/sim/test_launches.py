"""A simulated step has the attention of a real one, fused where a CUDA device's would be and named where it is not, and
launches what the formulas say that people reckon with: a decoder's arithmetic, the bytes of its gathers and reductions,
and its model states.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.sim.launches import CALLS, FAMILIES, WORLD
from tests.sim.test_matrix import LIMIT_S, ROOT

FLASH = {"causal", "grouped"}
PLAIN = {"fp64", "grouped and masked", "odd and masked"}


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.sim.launches"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CALLS)
def test_attention_takes_the_kernel_of_a_cuda_device(facts: dict[str, Any], name: str) -> None:
    """Imported by name, so that no later change of torch's module would be seen by the caller."""
    found = facts["calls"][name]
    kernel = "flash" if name in FLASH else "efficient"
    fused = [f"_scaled_dot_product_{kernel}_attention", f"_scaled_dot_product_{kernel}_attention_backward"]
    assert found["names"] == (["bmm"] if name in PLAIN else fused)
    assert len(found["plain"]) == (name in PLAIN)


def test_a_causal_kernel_computes_half_of_what_a_masked_one_does(facts: dict[str, Any]) -> None:
    assert facts["calls"]["masked"]["flops"] == 2 * facts["calls"]["causal"]["flops"]


def test_plain_attention_is_named_by_what_is_asked(facts: dict[str, Any]) -> None:
    (text,) = facts["calls"]["grouped and masked"]["plain"]
    assert text == "grouped masked torch.bfloat16 (2, 8, 128, 64)"


def test_a_model_that_asks_does_not_take_the_simulation_for_tracing(facts: dict[str, Any]) -> None:
    """It builds no mask, looks at its batch as it does on a real device, and is charged for both as there."""
    found = facts["careful"]
    assert "_scaled_dot_product_flash_attention" in found["names"] and not found["plain"]
    assert not {"tril", "bmm", "_scaled_dot_product_efficient_attention"} & set(found["names"])
    assert found["waits"] == ["read of numbers on the device"]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_takes_as_long_with_transformers_as_without(facts: dict[str, Any], family: str) -> None:
    seconds = facts["families"][family]
    assert seconds["with"] == pytest.approx(seconds["without"], rel=0.02)


def test_a_decoder_s_step_is_what_the_formulas_say(facts: dict[str, Any]) -> None:
    found, samples, sequence = facts["step"], 2, 64
    tokens, wide, narrow = samples * sequence, 4 * 48, 2 * 48
    block = 2 * 128 * wide + 2 * 128 * narrow + 3 * 128 * 320
    products, table = 3 * block + 128 * 500, 128 * 500
    parameters = products + table + (2 * 3 + 1) * 128
    assert found["parameters"] == parameters
    assert found["matmul"] == 6 * products * tokens  # 2 forward, 4 backward, for each weight and token
    assert found["attention"] == 7 * 3 * 4 * 48 * samples * sequence**2  # 4 forward and 10 backward, of half the square
    # in 16 bits: gradients once; weights twice, but for what the backward begins with, which stays. Padding: 12 ranks.
    padding = 12 * 2 * 100
    assert 2 * parameters <= found["reduce_scatter"] <= 2 * parameters + padding
    assert 2 * parameters + 2 * 3 * block <= found["all_gather"] <= 4 * parameters + padding
    # weight 2, gradient 4, fp32 weight and two moments 12
    assert 18 * parameters / WORLD <= found["states"] <= 18 * (parameters + padding) / WORLD + 4096
