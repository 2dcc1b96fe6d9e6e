"""TRL's SFTTrainer with packed samples whose sequences two ranks share: losses and norms of one rank."""

from pathlib import Path
from typing import Any

import pytest

from tests.compat.common import forget_clients, llama, need
from tests.compat.test_accelerate_sequence import parallelism
from tests.compat.test_hf_trainer import auto_config, history
from tests.compat.test_trl import text
from tests.compat.test_trl_checkpoint import sft
from tests.harness.pool import RankPool

need("accelerate", "transformers", "trl")
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:.*all_gather is deprecated")]
TILED = {"sequence_parallel_size": 2, "sequence": {"loss": "tiled", "mlp_tiles": 2}}
COMPARED = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")


def fine_tuned(folder: str, sp: int, stage: int, strategy: str, keys: dict[str, Any]) -> dict[str, list[float]]:
    from datasets import Dataset

    words = [" ".join(line.split()[: 3 + number % 4]) for number, line in enumerate(text(24, 1))]
    made = sft(
        folder,
        {**auto_config(stage, own_optimizer=True), **keys},
        words,
        {"model": llama(attn_implementation="sdpa"), "eval_dataset": Dataset.from_dict({"text": words[:4]})},
        per_device_train_batch_size=1,
        # At size 1 alone the Trainer weighs the micro-batches of a window by their tokens: windows of one.
        gradient_accumulation_steps=1,
        max_grad_norm=0.5,
        save_strategy="no",
        packing_strategy=strategy,
        pad_to_multiple_of=2,
        loss_type="chunked_nll",
        **({"parallelism_config": parallelism(sp)} if sp > 1 else {}),
    )
    made.train()
    found = {"eval_loss": [made.evaluate()["eval_loss"]]} | {key: history(made, key) for key in COMPARED}
    made.accelerator.free_memory(made.model_wrapped)
    forget_clients()
    return found


@pytest.mark.parametrize(("stage", "strategy", "keys"), [(3, "bfd", {}), (1, "wrapped", TILED)])
def test_packed_samples_train_as_on_one_rank(
    stage: int, strategy: str, keys: dict[str, Any], tmp_path: Path, pool1: RankPool, pool2: RankPool
) -> None:
    wanted = pool1.run(fine_tuned, str(tmp_path / "one"), 1, stage, strategy, {}, time_limit=120)[0]
    for found in pool2.run(fine_tuned, str(tmp_path / "two"), 2, stage, strategy, keys, time_limit=120):
        for name, values in wanted.items():
            assert found[name] == pytest.approx(values, abs=3e-5), name
        assert len(found["loss"]) == 4
