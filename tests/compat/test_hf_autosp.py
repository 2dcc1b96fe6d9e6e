"""The pass ``autosp``: a script that compiles a model of Transformers trains with sequences over ranks as on one."""

from typing import Any

import pytest
import torch

from tests.compat.common import need, zero_block
from tests.compat.test_hf_sequence import ADAM, model_of
from tests.harness.pool import RankPool
from tests.harness.sequences import batch_of
from tests.harness.training import outcome

need("transformers")
pytestmark = pytest.mark.timeout(300)
COMPILE = {"deepcompile": True, "passes": ["autosp"]}


def script(family: str, stage: int, backend: str, ways: dict[str, Any], mesh: Any = None) -> dict[str, list[float]]:
    """Losses and norms of three steps, and sums of the weights after them; lengths of batches differ."""
    import deepspeed
    from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs
    from deepspeed.utils import safe_get_full_fp32_param

    torch.compiler.reset()
    model = model_of(family, num_hidden_layers=1)
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": ADAM}, "gradient_clipping": 0.5,
        "zero_optimization": zero_block(stage), "compile": COMPILE, **ways,
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, config=config, mesh_param=mesh)[0]
    engine.compile(backend=backend)
    losses, norms = [], []
    for step, kind in enumerate(("padded", "odd", "plain")):
        batch = batch_of(kind, step, 0)
        positions = torch.arange(batch["input_ids"].shape[1]).expand(2, -1)
        ids, labels, positions, mask = prepare_autosp_inputs(
            batch["input_ids"], batch["labels"], positions, batch.get("attention_mask"), seq_dim=1
        )
        loss = engine(input_ids=ids, labels=labels, position_ids=positions, attention_mask=mask).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    sums = [float(safe_get_full_fp32_param(p).double().abs().sum()) for p in engine.module.parameters()]
    engine.destroy()
    graphs = [torch._dynamo.utils.counters["stats"]["unique_graphs"]]
    return {"losses": losses, "norms": norms, "sums": sums, "graphs": graphs}


@pytest.mark.parametrize(
    ("family", "stage", "backend", "by_mesh"), [("llama", 1, "eager", False), ("mixtral", 3, "eager", True)]
)
def test_a_compiled_script_trains_as_on_one_rank(
    pool1: RankPool,
    pool2: RankPool,
    family: str,
    stage: int,
    backend: str,
    by_mesh: bool,  # noqa: FBT001
) -> None:
    wanted = pool1.run(script, family, stage, backend, {}, time_limit=150)[0]
    ways: Any = ({}, (1, 2)) if by_mesh else ({"sequence_parallel_size": 2, "data_parallel_size": 1},)
    for found in pool2.run(script, family, stage, backend, *ways, time_limit=150):
        for name in ("losses", "norms", "sums"):
            assert found[name] == pytest.approx(wanted[name], rel=2e-6), name
        assert found["graphs"][0] > 0


def refusals() -> list[str]:
    import deepspeed
    from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

    def start(model: Any, **changes: Any) -> None:
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "compile": COMPILE, **changes}
        deepspeed.initialize(model=model, config=config)[0].destroy()

    ids = torch.ones(2, 6, dtype=torch.int64)
    eager = model_of("llama")
    eager.config._attn_implementation = "eager"
    return [
        outcome(lambda: start(torch.nn.Linear(2, 2), sequence_parallel_size=2)),
        outcome(lambda: start(eager, sequence_parallel_size=2)),
        outcome(lambda: start(model_of("llama"), compile={"passes": ["autosp", "autotp"]})),
        outcome(lambda: prepare_autosp_inputs(ids, ids, seq_dim=0)),
        outcome(lambda: prepare_autosp_inputs(ids, ids[:, 1:])),
        outcome(lambda: prepare_autosp_inputs(ids, ids, None, torch.ones(2, 1, 6, 6))),
    ]


def test_what_cannot_be_divided_is_refused_on_every_rank(pool2: RankPool) -> None:
    wanted = [
        'compile.passes has "autosp", but Linear is no model of Transformers',
        "attention 'eager' cannot be divided",
        "['autosp', 'autotp'] with deepcompile False: use \"autosp\" alone, or neither",
        "seq_dim is 0, and tokens are dimension 1",
        "labels has the shape (2, 5)",
        "attention_mask has the shape (2, 1, 6, 6)",
    ]
    for said in pool2.run(refusals):
        assert [text in one for text, one in zip(wanted, said, strict=True)] == [True] * len(wanted), said
