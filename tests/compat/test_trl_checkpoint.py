"""TRL: supervised fine-tuning that is saved and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.compat.common import equal, forget_clients, llama, need
from tests.compat.test_hf_checkpoint import finished
from tests.compat.test_hf_trainer import auto_config
from tests.compat.test_trl import arguments_of, text, tokenizer
from tests.harness.pool import RankPool

need("accelerate", "transformers", "trl")
pytestmark = pytest.mark.timeout(240)


def sft(folder: str, deepspeed: dict[str, Any], words: list[str], trainer: dict[str, Any], **changes: Any) -> Any:
    """A fine-tuning of packed samples; ``trainer``: more arguments of it, ``changes``: of its configuration."""
    import trl
    from datasets import Dataset

    forget_clients()
    options = {**arguments_of(folder, deepspeed), "max_steps": 4, "max_length": 16, "packing": True}
    args, data = trl.SFTConfig(**options | changes), Dataset.from_dict({"text": words})
    more = {"model": llama(), "processing_class": tokenizer()} | trainer
    return trl.SFTTrainer(args=args, train_dataset=data, **more)


def resumed(folder: str, stage: int, adapters: bool) -> dict[str, Any]:
    peft: dict[str, Any] = {}
    if adapters:
        from peft import LoraConfig

        peft["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def made() -> Any:
        config = auto_config(stage, own_optimizer=True)
        return sft(folder, config, text(24, 1), peft, save_strategy="steps", save_steps=2)

    straight = finished(made())
    again = finished(made(), f"{folder}/checkpoint-2")
    dist.barrier()
    return {"same": again[0] == straight[0] and equal(again[1], straight[1]), "losses": (straight[0], again[0])}


@pytest.mark.parametrize(("stage", "adapters"), [(3, False), (2, True)])
def test_fine_tuning_resumes_bit_for_bit(stage: int, adapters: bool, tmp_path: Path, pool2: RankPool) -> None:
    if adapters:
        pytest.importorskip("peft")
    for found in pool2.run(resumed, str(tmp_path), stage, adapters, time_limit=200):
        assert found["same"] and len(found["losses"][0]) == 4, found
