"""Lightning: the Trainer's DeepSpeedStrategy and Fabric, on CPU ranks behind a stand-in for its CUDA accelerator."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.compat.common import LR, apart, mean_over_ranks, mine, need, weights_apart, whole, zero_block
from tests.harness.pool import RankPool

need("lightning")
pytestmark = pytest.mark.timeout(180)
STEPS, WIDTH = 4, 12


def cpu_posing_as_cuda(base: type) -> Any:
    """Both strategies refuse any accelerator but a CUDAAccelerator; this one hands out CPU devices and changes nothing
    else.
    """

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


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def rows(count: int) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(8))
    return list(zip(x, x.sum(1, keepdim=True).sin(), strict=True))


def plain(
    data: list[tuple[Tensor, Tensor]], *, per_step: int, clip: float, decay: bool, divisor: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """One step from the mean over ``per_step`` micro-batches of two rows, its gradient divided by ``divisor``."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5 if decay else 1.0)
    losses = []
    for start in range(0, len(data), 2 * per_step):
        x, y = (torch.stack(part) for part in zip(*data[start : start + 2 * per_step], strict=True))
        loss = (model(x) - y).square().mean()
        (loss / divisor).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, whole(model)


def fitted(stage: int, folder: str, accumulate: int, born_sharded: bool) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import CUDAAccelerator
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DeepSpeedStrategy

    world = dist.get_world_size()
    data = rows(2 * world * STEPS * accumulate)
    # Lightning divides the loss by the accumulation and also tells the engine to; with the reference package it is the
    # same.
    expected, weights = plain(data, per_step=world * accumulate, clip=0.5, decay=True, divisor=accumulate)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential()
            self.seen: list[float] = []
            if not born_sharded:
                self.net = network()

        def configure_model(self) -> None:
            if not born_sharded or len(self.net):
                return
            import deepspeed

            self.net = network()
            self.sharded = hasattr(self.net[0].weight, "ds_id")
            values = [p.clone() for p in start]
            with torch.no_grad(), deepspeed.zero.GatheredParameters(list(self.net.parameters()), modifier_rank=0):
                for param, value in zip(self.net.parameters(), values, strict=True):
                    param.copy_(value)

        def training_step(self, batch: Any, _: int) -> Tensor:
            x, y = batch
            loss = (self.net(x) - y).square().mean()
            self.seen.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            self.log("val_loss", (self.net(x) - y).square().mean(), sync_dist=True)

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=LR, eps=1e-2)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
            }

    start = [p.detach().clone() for p in network().parameters()]
    config = {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero_block(stage),
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
    }
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator=cpu_posing_as_cuda(CUDAAccelerator),
        devices=world,
        strategy=DeepSpeedStrategy(config=config),
        plugins=[LightningEnvironment()],
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=True,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # Lightning's would shuffle
    )
    module = Module()
    loader = torch.utils.data.DataLoader(mine(data), batch_size=2, shuffle=False)
    validation = torch.utils.data.DataLoader(data[: 4 * world], batch_size=2)
    trainer.fit(module, loader, validation)
    engine = trainer.strategy.model
    facts = {
        "engine": type(engine).__name__ == "DeepSpeedEngine",
        "steps": trainer.global_step == STEPS == engine.global_steps,
        "optimizer": isinstance(trainer.optimizers[0].optimizer, torch.optim.AdamW),
        "validated": "val_loss" in trainer.callback_metrics,
        "sharded": not born_sharded or module.sharded,
    }
    seen = [sum(module.seen[i : i + accumulate]) / accumulate for i in range(0, len(module.seen), accumulate)]
    result = {
        "facts": facts,
        "loss": apart(mean_over_ranks(seen), expected),
        "weights": weights_apart(module.net, weights),
    }
    engine.destroy()
    return result


CASES = [(1, 1, False), (2, 2, False), (3, 2, False), (3, 1, True)]


@pytest.mark.parametrize(("stage", "accumulate", "born_sharded"), CASES)
@pytest.mark.parametrize("world", [1, 2])
def test_trainer_fits_like_plain_torch(
    world: int, stage: int, accumulate: int, born_sharded: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    for found in pool.run(fitted, stage, str(tmp_path), accumulate, born_sharded, time_limit=120):
        assert all(found["facts"].values()), found["facts"]
        assert found["loss"] < 1e-5 and found["weights"] < 1e-5, found


def checked_only(folder: str, stage: int) -> tuple[float, float]:
    """``trainer.test`` without training: an engine without optimizer."""
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import CUDAAccelerator
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def test_step(self, batch: Any, _: int) -> None:
            x, y = batch
            self.log("test_loss", (self.net(x) - y).square().mean(), sync_dist=True)

    data = rows(4 * dist.get_world_size())
    x, y = (torch.stack(part) for part in zip(*data, strict=True))
    expected = float((network()(x) - y).square().mean().detach())
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator=cpu_posing_as_cuda(CUDAAccelerator),
        devices=dist.get_world_size(),
        strategy=DeepSpeedStrategy(stage=stage),
        plugins=[LightningEnvironment()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (found,) = trainer.test(Module(), torch.utils.data.DataLoader(data, batch_size=2), verbose=False)
    trainer.strategy.model.destroy()
    return found["test_loss"], expected


@pytest.mark.parametrize("stage", [2, 3])
def test_testing_without_training(stage: int, tmp_path: Path, pool2: RankPool) -> None:
    for found, expected in pool2.run(checked_only, str(tmp_path), stage, time_limit=90):
        assert found == pytest.approx(expected, abs=1e-5)


def with_fabric(stage: int) -> dict[str, Any]:
    """Fabric calls ``optimizer.step()`` itself and never ``engine.step()``."""
    from lightning.fabric import Fabric
    from lightning.fabric.accelerators import CUDAAccelerator
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DeepSpeedStrategy

    import deepspeed

    world = dist.get_world_size()
    data = rows(2 * world * STEPS)
    expected, weights = plain(data, per_step=world, clip=0.0, decay=False)
    config = {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0, "zero_optimization": zero_block(stage)}
    fabric = Fabric(
        accelerator=cpu_posing_as_cuda(CUDAAccelerator),
        devices=world,
        strategy=DeepSpeedStrategy(config=config),
        plugins=[LightningEnvironment()],
    )
    fabric.launch()
    start = [p.detach().clone() for p in network().parameters()]
    with fabric.init_module():
        net = network()
    sharded = all(hasattr(p, "ds_id") for p in net.parameters())
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(net.parameters()), modifier_rank=0):
        for param, value in zip(net.parameters(), start, strict=True):
            param.copy_(value)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=LR, eps=1e-2))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=2, shuffle=False))
    losses = []
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    result = {
        "sharded": sharded == (stage == 3),
        "loss": apart(mean_over_ranks(losses), expected),
        "weights": weights_apart(net, weights),
    }
    model._forward_module.destroy()
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_fabric_trains_like_plain_torch(world: int, stage: int, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    for found in pool.run(with_fabric, stage, time_limit=90):
        assert found["sharded"] and found["loss"] < 1e-5 and found["weights"] < 1e-5, found
