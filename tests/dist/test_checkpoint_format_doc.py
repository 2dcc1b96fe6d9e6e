"""docs/checkpoint-format.md is true: its reader, numpy and sixty lines, gets the weights out of what an engine
saved.
"""

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.tools.verify.grads import full_parameters
from deepspeed.tools.verify.models import case_named
from tests.harness.pool import RankPool
from tests.harness.training import make_config, start, train_step

DOC = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


def reader(folder: Path) -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    assert len(code.splitlines()) <= 60
    script = folder / "reader.py"
    script.write_text(code)
    return runpy.run_path(str(script))


def save(folder: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    case = case_named("plain")
    engine = start(case.build(), config)
    for step in range(2):
        train_step(engine, case, step)
    engine.save_checkpoint(folder, "t", {"state": {1, 2}})
    found = {n: p.float() for n, p in full_parameters(engine.module).items()}
    engine.destroy()
    return found


@pytest.mark.parametrize("bf16", [False, True])
def test_the_reader_in_the_document_reads_a_checkpoint(pool2: RankPool, tmp_path: Path, bf16: bool) -> None:  # noqa: FBT001
    saved = pool2.run(save, str(tmp_path), make_config(3, **({"bf16": {"enabled": True}} if bf16 else {})))[0]
    found = reader(tmp_path)["read_weights"](tmp_path / "t")
    for name, value in saved.items():
        weights = torch.from_numpy(np.ascontiguousarray(found[name]))
        assert torch.equal(weights.bfloat16().float() if bf16 else weights, value), name


def test_the_reader_in_the_document_refuses_a_flipped_byte(pool1: RankPool, tmp_path: Path) -> None:
    pool1.run(save, str(tmp_path), make_config(2))
    read = reader(tmp_path)["read_weights"]
    for name in ("rank_00000.bin", "manifest.json"):
        path = tmp_path / "t" / name
        content = path.read_bytes()
        path.write_bytes(content[:70] + bytes([content[70] ^ 1]) + content[71:])
        with pytest.raises(ValueError, match=r"damaged|Expecting|delimiter|Invalid"):
            read(tmp_path / "t")
        path.write_bytes(content)
    assert read(tmp_path / "t")
