"""Writes ``reference_parts.tar.xz``: small checkpoints of DeepSpeed 0.19.8 whose parameters lie in parts.

Experts of ``MoE`` layers and of AutoEP, stages of pipelines, tensor-parallel ranks. Run it as
``make_reference_checkpoints.py``, whose folders these are: ``saved/`` and ``expected.npz``, values of the live engine.
"""

import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, INNER, WORDS, EXPERTS = 8, 4, 13, 4
CASES: dict[str, dict[str, Any]] = {
    "moe_s0_fp32_r2": {"ep": 2},
    "moe_s0_bf16_r2": {"ep": 2},
    "moe_s1_fp32_r4": {"ep": 2},
    "moe_s2_bf16_r2": {"ep": 2},
    "moe_s1_fp32_r4_data": {"ep": 2, "top": {"use_data_before_expert_parallelism": True}},
    "autoep_s0_fp32_r2": {"ep": 2},
    "autoep_s2_fp32_r4": {"ep": 2, "universal": True},
    "autoep_s3_fp32_r4": {"ep": 2},
    "pipe_s0_fp32_r2": {"pp": 2},
    "pipe_s1_fp32_r4": {"pp": 2},
    "pipe_s1_bf16_r2": {"pp": 2},
    "tp_s0_fp32_r2": {"tp": 2},
    "tp_s1_fp32_r4": {"tp": 2, "universal": True},
    "tp_s3_bf16_r4": {"tp": 2},
}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(hidden)))


class Layered(nn.Module):
    def __init__(self, ep: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList([MoE(HIDDEN, Expert(), EXPERTS, ep, k=1) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, extra = self.embed(tokens), 0.0
        for layer in self.layers:
            out, auxiliary, _ = layer(hidden)
            hidden, extra = hidden + out, extra + auxiliary
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten()) + 0.01 * extra


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.act_fn = EXPERTS, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / 4)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.hidden_dim = 2, EXPERTS, HIDDEN
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 3)


class Block(nn.Module):
    """Stands where AutoEP puts a layer of its own, so that nobody calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Router(), Experts()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Block()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.mlp(hidden)
        return hidden + (out[0] if isinstance(out, tuple) else out)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(WORDS, HIDDEN), nn.ModuleList([Layer() for _ in range(2)])


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Inner(), nn.Linear(HIDDEN, WORDS)
        sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER}
        self.config = SimpleNamespace(model_type="mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2, **sizes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.lm_head(hidden).float().flatten(0, 1), tokens.flatten())


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, HIDDEN), nn.LayerNorm(HIDDEN)
        self.up, self.down, self.head = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN), nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.down(torch.tanh(self.up(hidden))))
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def through_table(table: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ table.weight.T


def pipe_loss(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())


def config_for(kind: str, stage: int, dtype: str, case: dict[str, Any]) -> dict[str, Any]:
    specs = [{"patterns": [rf".*{n}.weight$"], "partition_type": t} for n, t in (("up", "column"), ("down", "row"))]
    blocks: dict[str, dict[str, Any]] = {
        "autoep": {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}},
        "tp": {
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"use_default_specs": False, "layer_specs": specs},
            }
        },
        "pipe": {"gradient_accumulation_steps": 2},
    }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        **blocks.get(kind, {}),
        **case.get("top", {}),
    }


def started(kind: str, config: dict[str, Any], case: dict[str, Any]) -> Any:
    """Return the engine of one rank."""
    import deepspeed

    if kind == "pipe":
        from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

        size = WORDS, HIDDEN
        layers = [
            TiedLayerSpec("embed", nn.Embedding, *size),
            LayerSpec(nn.Linear, HIDDEN, HIDDEN),
            torch.tanh,
            LayerSpec(nn.Linear, HIDDEN, HIDDEN),
            TiedLayerSpec("embed", nn.Embedding, *size, forward_fn=through_table),
        ]
        model: nn.Module = PipelineModule(layers, num_stages=case["pp"], loss_fn=pipe_loss)
    else:
        model = {"moe": lambda: Layered(case["ep"]), "autoep": Stacked, "tp": Cut}[kind]()
    params: Any = list(model.parameters())
    if kind == "moe":
        split = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer
        params = split({"params": params, "name": "parameters"})
    return deepspeed.initialize(model=model, model_parameters=params, config=config)[0]


def trained(kind: str, engine: Any, ways: int) -> None:
    torch.manual_seed(5 + torch.distributed.get_rank() // ways)
    for _ in range(2):
        if kind == "pipe":
            batches = [torch.randint(0, WORDS, (2, 5)) for _ in range(2)]
            engine.train_batch(iter([(tokens, tokens) for tokens in batches]))
            continue
        loss = engine(torch.randint(0, WORDS, (2, 5)))
        engine.backward(loss)
        engine.step()


def live(engine: Any, stage: int, dtype: str) -> dict[str, torch.Tensor]:
    """Return ``state|name`` -> tensor of this rank's part, whole over its data-parallel ranks. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    if stage == 0:
        optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        names = {id(p): n for n, p in engine.module.named_parameters()}
        if dtype == "bf16":  # masters in the order of the groups
            low = [p for group in engine.optimizer.fp16_groups for p in group]
            names |= {id(master): names[id(p)] for master, p in zip(held, low, strict=True)}
        for p in held:
            found[f"master|{names[id(p)]}"] = p.data
            found |= {f"optim.{s}|{names[id(p)]}": optimizer.state[p][s] for s in ("exp_avg", "exp_avg_sq")}
        return found
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        shape = getattr(p, "ds_shape", p.shape)
        found[f"master|{name}"] = safe_get_full_fp32_param(p).reshape(shape).clone()
        for slot in ("exp_avg", "exp_avg_sq"):
            found[f"optim.{slot}|{name}"] = safe_get_full_optimizer_state(p, slot).reshape(shape).clone()
        assert stage == 3 or torch.equal(found[f"master|{name}"].to(p.dtype), p.data), name
    return found


def whole(kind: str, of_ranks: list[dict[str, Any]], case: dict[str, Any]) -> dict[str, Any]:
    """Put the parts of all ranks together, as the layouts are described: neighbours have different parts."""
    if kind == "pipe":
        return {key: value for part in of_ranks for key, value in part.items()}
    if kind == "tp":
        dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
        pairs = [(key, key.partition("|")[2]) for key in of_ranks[0]]
        both = of_ranks[:2]
        return {k: torch.cat([p[k] for p in both], dims[n]) if n in dims else both[0][k] for k, n in pairs}
    far = case.get("top") is not None
    parts = [of_ranks[rank] for rank in ((0, len(of_ranks) // 2) if far else (0, 1))]
    found: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        for key, value in part.items():
            if "deepspeed_experts." in key:
                head, _, rest = key.partition("deepspeed_experts.")
                number, _, tail = rest.partition(".")
                key = f"{head}deepspeed_experts.{rank * EXPERTS // case['ep'] + int(number)}.{tail}"
            found.setdefault(key, value)
    for key in [key for key in found if key.endswith("experts.w1")]:
        w1, w2, w3 = (torch.cat([part[f"{key[:-1]}{i}"] for part in parts]) for i in (1, 2, 3))
        found[f"{key[:-2]}gate_up_proj"], found[f"{key[:-2]}down_proj"] = torch.cat([w1, w3], 1), w2
    kept = {k: v for k, v in found.items() if not k.endswith(("experts.w1", "experts.w2", "experts.w3"))}
    return {key.replace(".mlp.router.gate.weight", ".mlp.gate.weight"): value for key, value in kept.items()}


def worker(name: str, out: Path) -> None:
    """One rank: trains two steps, saves, and (rank 0) writes what must be read back."""
    import deepspeed

    kind, stage, dtype, *_ = name.split("_")
    case, level = CASES[name], int(stage[1:])
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend="gloo")
    engine = started(kind, config_for(kind, level, dtype, case), case)
    trained(kind, engine, case.get("tp", 1))
    engine.save_checkpoint(str(out / "saved"), client_state={"epoch": 2})
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, live(engine, level, dtype))
    if torch.distributed.get_rank() == 0:
        tensors = {k: to_numpy(v) for k, v in whole(kind, of_ranks, case).items()}
        np.savez_compressed(out / "expected.npz", **tensors)
    torch.distributed.barrier()


def to_numpy(value: torch.Tensor) -> np.ndarray:
    """fp32, as all that is compared."""
    return value.detach().float().numpy()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_case(folder: Path, ranks: int, worker: str, *, script: str, tag: str, universal: bool) -> None:
    """Start the ranks, convert where asked to, and drop the scripts that the reference puts beside its files.

    A rank is ``script --worker WORKER FOLDER``.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    started_ranks = []
    for rank in range(ranks):
        env = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"log{rank}").open("w") as log:
            call = [sys.executable, script, "--worker", worker, str(folder)]
            started_ranks.append(subprocess.Popen(call, env=env, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=240) for process in started_ranks]
    finally:
        for process in started_ranks:
            process.kill()
    if any(codes):
        worst = folder / f"log{codes.index(max(codes, key=abs))}"
        raise SystemExit(f"{folder.name}: {codes}\n" + worst.read_text()[-3000:])
    if universal:
        at = str(folder / "saved" / tag)
        pair = ["--input_folder", at, "--output_folder", f"{at}_universal"]
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        call = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *pair, *workers]
        env = {**os.environ, "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(call, capture_output=True, text=True, timeout=180, env=env)
        if done.returncode:
            raise SystemExit(f"{folder.name}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    for left in (*folder.glob("saved/*.py"), *folder.glob("log*")):
        left.unlink()


def main(out: Path, names: list[str]) -> None:
    for name in [n for n in CASES if not names or n in names]:
        universal, ranks = bool(CASES[name].get("universal")), int(name.split("_")[3][1:])
        run_case(out / name, ranks, name, script=__file__, tag="global_step2", universal=universal)
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
    with tarfile.open(out / "reference_parts.tar.xz", "w:xz", preset=9) as archive:
        for name in filter(lambda n: (out / n / "expected.npz").is_file(), CASES):
            archive.add(out / name, name)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(sys.argv[2], Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]).resolve(), sys.argv[2:])
