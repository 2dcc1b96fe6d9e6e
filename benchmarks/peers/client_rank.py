"""One rank of ``benchmarks/clients.py``: a client trains a tiny model under a package of the ``deepspeed`` interface,
this project's or the reference's; the script is the same. Nothing is downloaded: random weights, text of the standard
library.

    torchrun --nproc-per-node 2 client_rank.py raw:3:bf16 sft:2:fp32 [--reference]

For every cell a line "RESULT {...}" with the losses of all steps, the mean over the ranks.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY, CONTEXT, MICRO, ACCUMULATE, STEPS, LR = 128, 32, 2, 2, 10, 3e-3
CLIP = 1.0


def llama() -> nn.Module:
    """Two layers of width 32, the same at each call. Where a stage-3 configuration lives it is born in shards, with
    other values than else, and the same under both packages.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(11)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(shape).train()


def text() -> bytes:
    """ASCII of the standard library."""
    return bytes(b for b in (Path(os.__file__).parent / "argparse.py").read_bytes() if 9 <= b < VOCABULARY)


def rows(count: int) -> list[dict[str, Tensor]]:
    """``count`` rows of tokens, each its own label."""
    ids = torch.frombuffer(bytearray(text()[: count * CONTEXT]), dtype=torch.uint8).long().view(count, CONTEXT)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def mine(count: int = STEPS * ACCUMULATE) -> list[dict[str, Tensor]]:
    """This rank's micro-batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = rows(MICRO * world * count)
    groups = [every[i : i + MICRO] for i in range(0, len(every), MICRO)][rank::world]
    return [{key: torch.stack([row[key] for row in group]) for key in group[0]} for group in groups]


def over_ranks(losses: Iterable[float]) -> list[float]:
    """Means over the ranks, and over the micro-batches of a step."""
    total = torch.tensor(list(losses), dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).view(-1, ACCUMULATE).mean(1).tolist()


def settings(stage: int, dtype: str, *, auto: bool) -> dict[str, Any]:
    """A configuration as the clients' documentation writes it."""

    def choose(value: Any) -> Any:
        return "auto" if auto else value

    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 100
    adam = {"lr": choose(LR), "betas": choose([0.9, 0.999]), "eps": choose(1e-8), "weight_decay": choose(0.01)}
    return {
        "train_micro_batch_size_per_gpu": choose(MICRO),
        "gradient_accumulation_steps": choose(ACCUMULATE),
        "gradient_clipping": choose(CLIP),
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": choose(dtype == "bf16")},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
    }


def loop(model: nn.Module, config: dict[str, Any]) -> list[float]:
    """The plain loop of DeepSpeed's own examples."""
    deepspeed = importlib.import_module("deepspeed")
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": LR, "warmup_num_steps": 3, "warmup_type": "linear"}
    config["scheduler"] = {"type": "WarmupLR", "params": warmup}
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    losses = []
    for batch in mine():
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return over_ranks(losses)


def raw(stage: int, dtype: str, folder: str) -> list[float]:
    return loop(llama(), settings(stage, dtype, auto=False))


def peft(stage: int, dtype: str, folder: str) -> list[float]:
    """Adapters on a base that stage 3 builds in shards."""
    from peft import LoraConfig, get_peft_model
    from transformers.integrations import HfDeepSpeedConfig

    config = settings(stage, dtype, auto=False)
    alive = HfDeepSpeedConfig(config)
    base = llama()
    torch.manual_seed(2)
    chosen = ["q_proj", "v_proj", "up_proj"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=chosen, task_type="CAUSAL_LM"))
    losses = loop(model, config)
    del alive
    return losses


def accelerate(stage: int, dtype: str, folder: str) -> list[float]:
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    plugin = DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=ACCUMULATE, gradient_clipping=CLIP, zero3_init_flag=False
    )
    accelerator = Accelerator(
        mixed_precision="bf16" if dtype == "bf16" else "no",
        deepspeed_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    every = torch.utils.data.DataLoader(rows(MICRO * dist.get_world_size() * STEPS * ACCUMULATE), batch_size=MICRO)
    model, optimizer, loader = accelerator.prepare(model, optimizer, every)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return over_ranks(losses)


def arguments(dtype: str, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """What the trainers of Transformers and TRL share."""
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": dtype == "bf16",
        "max_steps": STEPS,
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": ACCUMULATE,
        "max_grad_norm": CLIP,
        "learning_rate": LR,
        "weight_decay": 0.01,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "deepspeed": config,
    }


def history(trainer: Any) -> list[float]:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.accelerator.free_memory()
    return losses


def trainer(stage: int, dtype: str, folder: str) -> list[float]:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**arguments(dtype, folder, settings(stage, dtype, auto=True)))
    data = rows(MICRO * ACCUMULATE * dist.get_world_size() * STEPS)
    return history(Trainer(model=llama(), args=args, train_dataset=data))


def tokenizer() -> Any:
    """One token a character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(i): i for i in range(3, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def lines(count: int, begin: int) -> list[str]:
    """``count`` lines of text of 12 to 60 characters."""
    every = [line for line in text().decode().splitlines() if 12 <= len(line) <= 60]
    return every[begin : begin + count]


def sft(stage: int, dtype: str, folder: str) -> list[float]:
    import trl
    from datasets import Dataset

    args = trl.SFTConfig(**arguments(dtype, folder, settings(stage, dtype, auto=True)), max_length=48)
    data = Dataset.from_dict({"text": lines(96, 0)})
    return history(trl.SFTTrainer(model=llama(), args=args, train_dataset=data, processing_class=tokenizer()))


def dpo(stage: int, dtype: str, folder: str) -> list[float]:
    import trl
    from datasets import Dataset

    args = trl.DPOConfig(**arguments(dtype, folder, settings(stage, dtype, auto=True)), max_length=48)
    data = Dataset.from_dict({"prompt": lines(96, 0), "chosen": lines(96, 96), "rejected": lines(96, 192)})
    made = trl.DPOTrainer(model=llama(), ref_model=llama(), args=args, train_dataset=data, processing_class=tokenizer())
    return history(made)


def cpu_posing_as_cuda(base: type) -> Any:
    """Lightning's strategy refuses any accelerator but CUDA's; this one hands out CPU devices."""

    class Stand(base):  # type: ignore[misc]
        def setup_device(self, device: torch.device) -> None:
            pass

        def setup(self, trainer: Any) -> None:
            pass

        def teardown(self) -> None:
            pass

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return list(range(devices)) if isinstance(devices, int) else devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device("cpu", i) for i in devices]

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

    return Stand()


def lightning(stage: int, dtype: str, folder: str) -> list[float]:
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import CUDAAccelerator
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = llama(), list[float]()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = self.net(**batch).loss
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    module = Module()
    config = {"zero_allow_untested_optimizer": True, "zero_optimization": settings(stage, dtype, auto=False)}
    config["zero_optimization"] = config["zero_optimization"]["zero_optimization"]
    batches = [batch for batch in mine()]
    config["train_micro_batch_size_per_gpu"] = len(batches[0]["input_ids"])
    made = pl.Trainer(
        default_root_dir=folder,
        accelerator=cpu_posing_as_cuda(CUDAAccelerator),
        devices=dist.get_world_size(),
        strategy=DeepSpeedStrategy(config=config),
        plugins=[LightningEnvironment()],
        precision="bf16-mixed" if dtype == "bf16" else "32-true",
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    made.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return over_ranks(module.seen)


CLIENTS: dict[str, Callable[[int, str, str], list[float]]] = {
    "raw": raw,
    "trainer": trainer,
    "accelerate": accelerate,
    "peft": peft,
    "lightning": lightning,
    "sft": sft,
    "dpo": dpo,
}


def forget() -> None:
    """What a client has left in globals and the environment."""
    for name in [n for n in os.environ if n.startswith("ACCELERATE_")]:
        del os.environ[name]
    state = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
    importlib.import_module("transformers.integrations.deepspeed").unset_hf_deepspeed_config()


def main() -> None:
    """The cells one after the other, up to the first that fails: what the ranks owe each other is unknown then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", metavar="CLIENT:STAGE:DTYPE")
    parser.add_argument("--reference", action="store_true", help="the package must be the reference, not this tree")
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed = importlib.import_module("deepspeed")
    here = Path(__file__).resolve().parents[2]
    if Path(deepspeed.__file__ or "").resolve().is_relative_to(here) is args.reference:
        raise SystemExit(f"deepspeed is {deepspeed.__file__}: the wrong one of the two; see benchmarks/README.md")
    deepspeed.init_distributed(dist_backend="gloo")
    for cell in args.cells:
        client, stage, dtype = cell.split(":")
        row: dict[str, Any] = {"cell": cell}
        with tempfile.TemporaryDirectory() as folder:
            try:
                row["losses"] = CLIENTS[client](int(stage), dtype, folder)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
                traceback.print_exc()
        forget()
        if dist.get_rank() == 0 or "error" in row:
            sys.stdout.write("RESULT " + json.dumps(row) + "\n")
            sys.stdout.flush()
        if "error" in row:
            os._exit(1)
    with contextlib.suppress(Exception):
        dist.barrier()
    os._exit(0)  # exit handlers of clients are no part of this


if __name__ == "__main__":
    main()
