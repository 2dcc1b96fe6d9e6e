"""TRL's SFTTrainer with packed samples whose sequences ranks share: the losses of one rank."""

from pathlib import Path
from typing import Any

import pytest

from tests.compat.common import LR, llama, need
from tests.compat.test_accelerate_sequence import parallelism
from tests.compat.test_hf_trainer import auto_config, history
from tests.compat.test_trl import text, tokenizer
from tests.harness.pool import RankPool

need("accelerate", "transformers", "trl")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*all_gather is deprecated", "ignore:.*chunked_nll.* is deprecated"),
]


def fine_tuned(folder: str, sp: int, stage: int, strategy: str) -> dict[str, list[float]]:
    import trl
    from datasets import Dataset

    from tests.compat.common import forget_clients

    forget_clients()
    options: dict[str, Any] = {"parallelism_config": parallelism(sp)} if sp > 1 else {}
    args = trl.SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        learning_rate=LR,
        adam_epsilon=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        seed=3,
        packing=True,
        packing_strategy=strategy,
        max_length=16,
        pad_to_multiple_of=2,
        loss_type="chunked_nll",
        deepspeed=auto_config(stage, own_optimizer=True),
        **options,
    )
    data = Dataset.from_dict({"text": [" ".join(one.split()[: 3 + n % 4]) for n, one in enumerate(text(24, 1))]})
    made = trl.SFTTrainer(
        model=llama(attn_implementation="sdpa"),
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
    )
    made.train()
    evaluated = made.evaluate()
    found = {key: history(made, key) for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")}
    found["eval"] = [evaluated["eval_loss"]]
    made.accelerator.free_memory(made.model_wrapped)
    forget_clients()
    return found


@pytest.mark.parametrize(("stage", "strategy"), [(3, "bfd"), (1, "wrapped")])
def test_packed_samples_shared_by_two_ranks_train_as_on_one(
    stage: int, strategy: str, tmp_path: Path, pool1: RankPool, pool2: RankPool
) -> None:
    wanted = pool1.run(fine_tuned, str(tmp_path / "one"), 1, stage, strategy, time_limit=120)[0]
    for found in pool2.run(fine_tuned, str(tmp_path / "two"), 2, stage, strategy, time_limit=120):
        print(wanted)
        print(found)
        for name in ("loss", "eval"):
            assert found[name] == pytest.approx(wanted[name], abs=2e-5)
