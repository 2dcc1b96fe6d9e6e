"""Train a byte-level GPT with Lightning's Trainer and its DeepSpeedStrategy, under any ZeRO stage.

    deepspeed --num_gpus 2 examples/lightning_fit.py
    deepspeed --num_gpus 8 examples/lightning_fit.py --stage 3 --steps 2000 --out runs/gpt

The first takes half a minute on two CPU cores that do nothing else.
The module is an ordinary LightningModule. Under stage 3 ``configure_model`` is where Lightning builds in shards.
Without a GPU a stand-in takes the place of Lightning's CUDA accelerator, which is all that its strategy accepts.
Writes a checkpoint, which loads on any number of ranks, and the plot of the loss to <out>.
"""

from typing import Any

import torch
from gpt import GPT, GPTConfig
from shared import ON_CPU, Row, checked, command_line, need, read_text, report, rows
from torch import Tensor
from torch.utils.data import DataLoader

import deepspeed.comm as dist

need("lightning")
import lightning.pytorch as pl  # noqa: E402 - behind the sentence that it is missing
from lightning.pytorch.accelerators import CUDAAccelerator  # noqa: E402
from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy  # noqa: E402


class CPUInPlaceOfCUDA(CUDAAccelerator):
    """What Lightning asks of an accelerator, answered with CPU devices."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to choose."""

    setup = setup_device  # nothing to clear

    @staticmethod
    def parse_devices(devices: int) -> list[int]:
        """A count as a list."""
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """A device for each rank."""
        return [torch.device("cpu", i) for i in devices]

    @staticmethod
    def is_available() -> bool:
        """Always."""
        return True


class Bytes(pl.LightningModule):
    """The GPT of gpt.py as Lightning wants it."""

    def __init__(self, shape: GPTConfig, lr: float, seed: int) -> None:
        super().__init__()
        self.shape, self.lr, self.seed, self.losses = shape, lr, seed, list[float]()
        self.model: GPT | None = None

    def configure_model(self) -> None:
        """Called once the strategy is ready: under stage 3 the model is born in shards."""
        if self.model is None:
            torch.manual_seed(self.seed)
            self.model = GPT(self.shape)

    def _loss(self, batch: Row) -> Tensor:
        ids = batch["input_ids"]
        return self.model(ids[:, :-1], ids[:, 1:])  # type: ignore[misc]

    def training_step(self, batch: Row, _: int) -> Tensor:
        """One micro-batch."""
        loss = self._loss(batch)
        self.log("loss", loss.detach(), prog_bar=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Keep the loss of all ranks for the plot."""
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch: Row, _: int) -> None:
        """Held-out rows."""
        self.log("held_out", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any torch optimizer is sharded."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    """Build, fit, save."""
    parser = command_line(__doc__, steps=60, lr=1e-3)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of ZeRO: what is sharded over ranks")
    args = checked(parser)
    # By default parameters of up to 100,000 elements stay whole on every rank: all of this model at its default size.
    zero = {"stage": args.stage, "stage3_param_persistence_threshold": 1000}
    deepspeed_config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    dist.init_distributed()
    trainer = pl.Trainer(
        default_root_dir=args.out,
        accelerator=CPUInPlaceOfCUDA() if ON_CPU else "cuda",
        devices=dist.get_world_size(),
        strategy=DeepSpeedStrategy(config=deepspeed_config),
        plugins=[LightningEnvironment()],
        precision="32-true" if ON_CPU else "bf16-true",
        max_steps=args.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        val_check_interval=args.steps,
        check_val_every_n_epoch=None,
    )
    text = torch.frombuffer(bytearray(read_text(args.text).encode()), dtype=torch.uint8).long()
    data, held_out = rows(text, args.context + 1, at_least=args.batch * dist.get_world_size())
    module = Bytes(GPTConfig(256, args.context), args.lr, args.seed)
    loaders = DataLoader(data, args.batch, shuffle=True, drop_last=True), DataLoader(held_out, args.batch)
    trainer.fit(module, *loaders)  # evaluates at the end
    trainer.save_checkpoint(args.out / "lightning.ckpt")  # a folder; every rank writes its part
    title = f"Lightning, ZeRO-{args.stage}, {trainer.world_size} rank(s)"
    report(module.losses, float(trainer.callback_metrics["held_out"]), title, args.out / "lightning_fit.png")


if __name__ == "__main__":
    main()
