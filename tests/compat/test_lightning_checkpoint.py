"""Lightning: checkpoints of the Trainer and of Fabric, resumed and turned into one file, under its
DeepSpeedStrategy.
"""

import datetime
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.compat.common import LR, equal, everything, mine, need, zero_block
from tests.compat.test_lightning import WIDTH, cpu_posing_as_cuda, network, rows
from tests.harness.pool import RankPool

need("lightning")
pytestmark = pytest.mark.timeout(180)
STEPS, SAVED = 4, 2
HYPER = {
    "width": WIDTH,
    "folder": Path("data/x"),
    "inner": Namespace(rate=LR),
    "limit": datetime.timedelta(hours=1),
    "sizes": (1, 2),
}


def module_class() -> type:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        """A network with dropout, a plateau schedule and hyperparameters of several types."""

        def __init__(self, hyper: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = network()
            self.net.append(nn.Dropout(0.0))
            self.drop = nn.Dropout(0.2)
            self.seen: list[float] = []
            self.own: Any = None

        def training_step(self, batch: Any, _: int) -> Tensor:
            x, y = batch
            loss = (self.drop(self.net(x)) - y).square().mean()
            self.seen.append(float(loss.detach()))
            self.log("loss", loss)
            return loss

        def test_step(self, batch: Any, _: int) -> None:
            x, y = batch
            self.log("test_loss", (self.net(x) - y).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=LR, eps=1e-2)
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = {"seen": len(self.seen), "rate": torch.tensor(LR), 3: {"a", "b"}}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.own = checkpoint["own"]

    return Module


def trainer_for(folder: str, stage: int, **strategy: Any) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import CUDAAccelerator
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DeepSpeedStrategy

    config = {"zero_allow_untested_optimizer": True, "zero_optimization": zero_block(stage)}
    return pl.Trainer(
        default_root_dir=folder,
        accelerator=cpu_posing_as_cuda(CUDAAccelerator),
        devices=dist.get_world_size(),
        strategy=DeepSpeedStrategy(config=config, **strategy),
        plugins=[LightningEnvironment()],
        callbacks=[
            ModelCheckpoint(
                folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1, monitor="loss", save_last=True
            ),
            EarlyStopping("loss", patience=99, check_on_train_epoch_end=True),
            Timer(datetime.timedelta(hours=1)),
        ],
        max_steps=STEPS,
        max_epochs=3,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )


def data(per_epoch: int) -> Any:
    return torch.utils.data.DataLoader(mine(rows(2 * dist.get_world_size() * per_epoch)), batch_size=2, shuffle=False)


def fitted(folder: str, stage: int, per_epoch: int, resume: str | None) -> tuple[Any, Any]:
    torch.manual_seed(1)
    module, trainer = module_class()(HYPER), trainer_for(folder, stage)
    if resume:
        with torch.no_grad():
            for param in module.parameters():
                param.add_(1.0)
    trainer.fit(module, data(per_epoch), ckpt_path=resume)
    return module, trainer


def resumed(folder: str, stage: int) -> dict[str, Any]:
    """An epoch has as many steps as there are before a checkpoint: within an epoch, Lightning begins the data anew."""
    module, trainer = fitted(folder, stage, SAVED, None)
    weights = everything(module.net)
    rates = [o.param_groups[0]["lr"] for o in trainer.optimizers]
    trainer.strategy.model.destroy()
    again, after = fitted(f"{folder}/again", stage, SAVED, f"{folder}/step={SAVED}.ckpt")
    found = {
        "weights": equal(everything(again.net), weights),
        "losses": again.seen == module.seen[SAVED:],
        "steps": after.global_step == after.strategy.model.global_steps == STEPS,
        "rates": rates == [o.param_groups[0]["lr"] for o in after.optimizers] == [LR / 4],
        "own": again.own["seen"] == SAVED
        and again.own[3] == {"a", "b"}
        and float(again.own["rate"]) == pytest.approx(LR),
    }
    after.strategy.model.destroy()
    return {**found, "seen": (module.seen, again.seen)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fit_from_a_checkpoint_equals_an_uninterrupted_run_bit_for_bit(
    stage: int, tmp_path: Path, pool2: RankPool
) -> None:
    for found in pool2.run(resumed, str(tmp_path), stage, time_limit=120):
        assert all(found.values()), found
    folder = tmp_path / f"step={SAVED}.ckpt"
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint", "latest", "zero_to_fp32.py"]
    assert (tmp_path / "last.ckpt" / "checkpoint" / "manifest.json").is_file()


def trained(folder: str, stage: int) -> dict[str, Tensor]:
    module, trainer = fitted(folder, stage, STEPS, None)
    weights = everything(module.net)
    trainer.strategy.model.destroy()
    return weights


def evaluated(folder: str, stage: int, path: str, **strategy: Any) -> tuple[float, dict[str, Tensor]]:
    module, trainer = module_class()(HYPER), trainer_for(folder, stage, **strategy)
    (found,) = trainer.test(module, data(STEPS), ckpt_path=path, verbose=False)
    weights = everything(module.net)
    trainer.strategy.model.destroy()
    return found["test_loss"], weights


def whole_file(folder: str, stage: int) -> dict[str, Any]:
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    weights = trained(folder, stage)
    saved = f"{folder}/step={STEPS}.ckpt"
    loss, sharded = evaluated(f"{folder}/test", stage, saved)
    single = f"{folder}/single.pt"
    if dist.get_rank() == 0:
        convert_zero_checkpoint_to_fp32_state_dict(saved, single)
    dist.barrier()
    loaded = module_class().load_from_checkpoint(single, weights_only=False)
    content = torch.load(single, weights_only=False)
    found: dict[str, Any] = {
        "tested": equal(sharded, weights),
        "converted": equal(dict(loaded.net.named_parameters()), weights),
        "state": content["own"]["seen"] == STEPS
        and content["global_step"] == STEPS
        and loaded.hparams.hyper["width"] == WIDTH,
    }
    if stage == 3:
        value, full = evaluated(f"{folder}/full", stage, single, load_full_weights=True)
        found["full"] = equal(full, weights) and value == pytest.approx(loss, abs=1e-6)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_one_file_of_lightning_and_the_folder_hold_the_same(stage: int, tmp_path: Path, pool2: RankPool) -> None:
    for found in pool2.run(whole_file, str(tmp_path), stage, time_limit=120):
        assert all(found.values()), found


def test_one_rank_tests_what_two_trained(tmp_path: Path, pool2: RankPool, pool1: RankPool) -> None:
    weights = pool2.run(trained, str(tmp_path), 3, time_limit=120)[0]
    ((_, found),) = pool1.run(evaluated, str(tmp_path / "one"), 2, str(tmp_path / f"step={STEPS}.ckpt"), time_limit=120)
    assert equal(found, weights)


def fabric_for(stage: int) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.accelerators import CUDAAccelerator
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DeepSpeedStrategy

    config = {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.5, "zero_optimization": zero_block(stage)}
    fabric = Fabric(
        accelerator=cpu_posing_as_cuda(CUDAAccelerator),
        devices=dist.get_world_size(),
        strategy=DeepSpeedStrategy(config=config),
        plugins=[LightningEnvironment()],
    )
    fabric.launch()
    return fabric


def fabric_run(stage: int, shift: float) -> dict[str, Any]:
    """The state people pass to ``fabric.save``: model, optimizer, an object with a state, plain values."""
    fabric = fabric_for(stage)
    with fabric.init_module():
        net = network()
    import deepspeed

    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(net.parameters()), modifier_rank=0):
        for i, param in enumerate(net.parameters()):
            param.copy_(torch.linspace(-0.5, 0.5, param.numel()).view(param.shape) * (i + 1) / 6 + shift)
    adam = torch.optim.AdamW(net.parameters(), lr=LR, eps=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(
        adam, 2, 0.5
    )  # Fabric's wrapper of the engine's optimizer is none of torch's
    model, optimizer = fabric.setup(net, adam)
    return {
        "fabric": fabric,
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "step": 0,
        "best": {"loss": float("inf")},
    }


def fabric_go(run: dict[str, Any], until: int) -> list[float]:
    losses = []
    loader = torch.utils.data.DataLoader(mine(rows(2 * dist.get_world_size() * STEPS)), batch_size=2)
    for x, y in list(loader)[run["step"] : until]:
        loss = (run["model"](x) - y).square().mean()
        run["fabric"].backward(loss)
        run["optimizer"].step()
        run["schedule"].step()
        run["optimizer"].zero_grad()
        run["step"] += 1
        losses.append(float(loss.detach()))
    return losses


def fabric_states(folder: str, stage: int) -> dict[str, Any]:
    run = fabric_run(stage, 0.0)
    fabric_go(run, SAVED)
    state = {k: v for k, v in run.items() if k != "fabric"}
    run["fabric"].save(folder, state)
    run["fabric"].save(folder, state)  # twice to one path
    losses = fabric_go(run, STEPS)
    weights = everything(run["model"].module)
    new = fabric_run(stage, 1.0)
    found: dict[str, Any] = {}
    for name, to in {"same engine": run, "new engine": new}.items():
        state = {k: v for k, v in to.items() if k != "fabric"}
        rest = to["fabric"].load(folder, state)
        to.update(step=state["step"], best=state["best"])
        found[name] = to["step"] == SAVED and to["best"] == {"loss": float("inf")} and "ds_version" in rest
        found[name] &= fabric_go(to, STEPS) == losses and equal(everything(to["model"].module), weights)
    for to in (run, new):
        to["model"]._forward_module.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fabric_load_goes_on_as_if_nothing_had_happened(stage: int, tmp_path: Path, pool2: RankPool) -> None:
    for found in pool2.run(fabric_states, str(tmp_path / "saved"), stage, time_limit=120):
        assert all(found.values()), found


def fabric_raw(folder: str) -> dict[str, Any]:
    """Whole weights of a sharded run, as one file for a model that is not set up yet."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    run = fabric_run(3, 0.0)
    fabric_go(run, SAVED)
    run["fabric"].save(folder, {"model": run["model"]})
    weights = everything(run["model"].module)
    run["model"]._forward_module.destroy()
    found = {"function": equal(get_fp32_state_dict_from_zero_checkpoint(folder), weights)}
    if dist.get_rank() == 0:
        torch.save(get_fp32_state_dict_from_zero_checkpoint(folder), f"{folder}.pt")
    dist.barrier()
    net = network()
    run["fabric"].load_raw(f"{folder}.pt", net)
    return {**found, "raw": equal(dict(net.named_parameters()), weights)}


def test_weights_of_fabric_come_out_as_one_file(tmp_path: Path, pool2: RankPool) -> None:
    for found in pool2.run(fabric_raw, str(tmp_path / "saved"), time_limit=120):
        assert all(found.values()), found


def refused(folder: str) -> str:
    module, trainer = fitted(folder, 2, STEPS, None)
    trainer.strategy.model.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/step={STEPS}.ckpt/checkpoint")
    dist.barrier()
    try:
        fitted(f"{folder}/again", 2, STEPS, f"{folder}/step={STEPS}.ckpt")
    except FileNotFoundError as error:
        return str(error)
    return ""


def test_a_folder_without_checkpoint_is_refused_by_lightning_itself(tmp_path: Path, pool2: RankPool) -> None:
    for text in pool2.run(refused, str(tmp_path), time_limit=120):
        assert "not a valid DeepSpeed checkpoint" in text
