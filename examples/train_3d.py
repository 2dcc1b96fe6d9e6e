"""Train the GPT of train_gpt.py in pipeline stages and in parts of layers, and see that it is the same training.

    python examples/train_3d.py [--steps 40] [--out out]

takes a minute and a half on two CPU cores that do nothing else. It starts, one after the other, one process; the same
with the batch cut into other micro-batches, which shows what another order of fp32 additions does to this curve; four
ranks as two pipeline stages x two data-parallel ranks; four ranks as two tensor-parallel x two data-parallel ranks. It
draws the curves into <out>/train_3d.png and prints how far they are from the one process, and then what memory a rank
needs for a larger model as one stage and as two.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, GPTConfig
from torch import Tensor
from tqdm import tqdm
from train_gpt import Corpus, plot

import deepspeed
import deepspeed.comm as dist
from deepspeed.pipe import cut_model
from deepspeed.utils import groups

BATCH = 16


@dataclass(frozen=True)
class Layout:
    """``ranks`` in ``pp`` pipeline stages and ``tp`` parts of each layer; micro-batches of ``micro`` sequences."""

    ranks: int
    micro: int
    pp: int = 1
    tp: int = 1


LAYOUTS = {
    "one process": Layout(1, micro=4),
    "one process, other micro-batches": Layout(1, micro=2),
    "pp2 x dp2": Layout(4, micro=2, pp=2),
    "tp2 x dp2": Layout(4, micro=4, tp=2),
}
# Attention and feed-forward are split in pairs: by outputs, then by inputs, with one sum over the ranks behind both.
SPLIT = {
    "layer_specs": [
        {"patterns": [r".*\.qkv\.weight"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": [r".*\.up\.weight"], "partition_type": "column"},
        {"patterns": [r".*\.(project|down)\.weight"], "partition_type": "row"},
    ],
    "lm_head_patterns": ["head"],
}


def config_of(layout: Layout, steps: int) -> dict[str, Any]:
    """The configuration of train_gpt.py, with half its learning rate for a short run, and how the ranks are cut."""
    schedule = {"total_num_steps": steps, "warmup_num_steps": steps // 5, "warmup_type": "linear"}
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": layout.micro,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": {**schedule, "cos_min_ratio": 0.1}},
    }
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp, "partition_config": SPLIT}
    if layout.pp > 1:
        config["pipeline"] = {"schedule": "1f1b"}
    return config


def train_step(engine: Any, inputs: Tensor, targets: Tensor, micro: int) -> float:
    """One update from this data-parallel rank's rows; the mean loss of the whole batch."""
    ways = groups.get_data_parallel_world_size()
    rows = slice(groups.get_data_parallel_rank(), None, ways)
    parts = list(zip(inputs[rows].split(micro), targets[rows].split(micro), strict=True))
    if isinstance(engine, deepspeed.PipelineEngine):
        return float(engine.train_batch(iter([{"ids": ids, "targets": labels} for ids, labels in parts])))
    total = torch.zeros(())
    for ids, labels in parts:
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        total += loss.detach() / len(parts)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()  # ranks that share layers have the same loss


def train(name: str, sizes: GPTConfig, steps: int) -> list[float]:
    """The loss curve of one layout, on as many ranks as this process group has."""
    layout = LAYOUTS[name]
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(sizes)
    if layout.pp > 1:
        model = cut_model(model, num_stages=layout.pp)
    engine = deepspeed.initialize(model=model, config=config_of(layout, steps))[0]
    corpus, curve = Corpus(sizes.context, seed=0), list[float]()
    with tqdm(total=steps, unit="step", desc=name, disable=dist.get_rank() != 0, dynamic_ncols=True) as bar:
        for step in range(steps):
            curve.append(train_step(engine, *corpus.batch(step, BATCH), layout.micro))
            bar.set_postfix_str(f"loss {curve[-1]:.3f}")
            bar.update()
    engine.destroy()
    return curve


def memory_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (the most so far) of this process."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"train_3d: /proc/self/status has no {field}; the measurement of memory needs Linux")
    return int(match.group(1)) / 1024


def peak_memory(stages: int, sizes: GPTConfig) -> tuple[float, float]:
    """What two steps of a pipeline of ``stages`` (1: one process) add to this process, in MiB, and its base.

    The control comes first: the same with a model of next to nothing, so that the base has all code that is loaded on
    the way. Each stage takes four micro-batches of one sequence.
    """
    base = 0.0
    tiny = GPTConfig(sizes.vocab, sizes.context, 16, sizes.layers, 2)
    for part in (tiny, sizes):
        engine = deepspeed.initialize(
            model=cut_model(GPT(part), num_stages=stages),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 4,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            },
        )[0]
        ids = torch.zeros(1, sizes.context, dtype=torch.long)
        for _ in range(2):
            engine.train_batch(iter([{"ids": ids, "targets": ids}] * 4))
        if part is sizes:
            return memory_mib("VmHWM") - base, base
        engine.destroy()
        del engine
        base = memory_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the most so far begins anew
    raise AssertionError


def work(args: argparse.Namespace) -> None:
    """One rank of what ``main`` starts; rank 0 writes the result."""
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    if args.layout:
        result: Any = train(args.layout, GPTConfig(256, args.context, args.width, args.layers, args.heads), args.steps)
    else:
        sizes = GPTConfig(256, 64, args.memory_width, args.memory_layers, args.memory_width // 64)
        result = [None] * dist.get_world_size()
        dist.all_gather_object(result, peak_memory(args.stages, sizes))
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(result))


def launch(args: argparse.Namespace, ranks: int, name: str, *options: str) -> Any:
    """Run this script on ``ranks`` ranks of this machine; what its rank 0 has written."""
    result = args.out / f"train_3d_{re.sub(r'[^0-9a-z]+', '_', name)}.json"
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), str(Path(__file__))]
    sizes = ("context", "width", "layers", "heads", "steps", "memory_width", "memory_layers")
    command += [f"--{size.replace('_', '-')}={getattr(args, size)}" for size in sizes]
    environment = {"DS_LOG_LEVEL": "WARNING", **os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([*command, "--result", str(result), *options], env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"train_3d: {name} failed with exit code {done.returncode}")
    return json.loads(result.read_text())


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the curves and their picture")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--memory-width", type=int, default=512, help="of the model whose memory is measured")
    parser.add_argument("--memory-layers", type=int, default=8)
    for own in ("--layout", "--stages", "--result", "--local_rank"):  # of the ranks that this script starts
        parser.add_argument(own, type={"--result": Path, "--layout": str}.get(own, int), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Start everything; draw and print."""
    args = parse_arguments()
    if args.result is not None:
        work(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    curves = {name: launch(args, it.ranks, name, "--layout", name) for name, it in LAYOUTS.items()}
    memory = {stages: launch(args, stages, f"memory {stages}", "--stages", str(stages)) for stages in (1, 2)}
    one, *others = curves.items()
    for name, curve in others:
        apart = [abs(a - b) for a, b in zip(curve, one[1], strict=True)]
        tqdm.write(f"{name}: {max(apart):.1e} nats from {one[0]} at most, {apart[0]:.1e} in the first step")
    shown = {name: list(enumerate(curve, 1)) for name, curve in curves.items() if "," not in name}
    plot(shown, f"GPT of {args.layers} blocks, one process and four ranks", args.out / "train_3d.png")
    (whole, base), *_ = memory[1]
    for rank, (peak, _) in enumerate(memory[2]):
        text = f"{peak:.0f} MiB above its base of {base:.0f}, one stage {whole:.0f}"
        tqdm.write(f"memory of rank {rank} of two stages: {text} ({peak / whole:.2f}x)")


if __name__ == "__main__":
    main()
