"""ZeRO 0-3 on CUDA: parity with plain PyTorch on one rank, and over nccl where the machine has two devices."""

import os
import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(300),
]
STEPS = 4


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Sequential(*blocks), torch.nn.Linear(64, 8))


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * step + rank))


def _reference(world: int) -> list[torch.Tensor]:
    model = _model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(model(_batch(step, r).double()).square().mean() for r in range(world)) / world).backward()
        optimizer.step()
    return [p.detach().float() for p in model.parameters()]


def _train(rank: int, world: int, port: int, level: int, dtype: str, out: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": level, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
    }
    if dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    engine, *_ = deepspeed.initialize(model=_model(), config=config)
    cast = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for step in range(STEPS):
        loss = engine(_batch(step, rank).to(engine.device, cast)).float().square().mean()
        engine.backward(loss)
        engine.step()
    found = [deepspeed.utils.safe_get_full_fp32_param(p).cpu() for p in engine.module.parameters()]
    if rank == 0:
        out.extend(found)
    engine.destroy()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_masters_follow_plain_adamw(world: int, level: int, dtype: str) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} devices")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with mp.Manager() as manager:
        out = manager.list()
        mp.spawn(_train, args=(world, port, level, dtype, out), nprocs=world)
        tolerance = 1e-5 if dtype == "fp32" else 3e-2
        for ours, reference in zip(list(out), _reference(world), strict=True):
            assert (ours - reference).abs().max().item() <= tolerance
