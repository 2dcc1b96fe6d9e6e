"""``ds_bench load``: what it costs each rank to get its part of a model from a folder of safetensors files.

    ds_bench load --model ./llama --ranks 4
    ds_bench load --model ./llama --ranks 4 --zero 0 --json
    ds_bench load --model ./llama --ranks 8 --transformers --max-rss 1.3x-shard

CPU ranks of this machine map the files and let deepspeed.initialize take over the weights, or, with --transformers,
call from_pretrained under ZeRO-3 as a training script does. Measured are the seconds of the slowest rank, the bytes
that each rank read, and by how much its resident memory grew at most, beside the bound: so many times its part, the
largest tensor, and 16 MiB. Exit status: 0; 1 above the bound; 2 for wrong input.
"""

import argparse
import importlib
import importlib.util
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.monitor import hostmem
from deepspeed.monitor.program import CheckFailedError, size
from deepspeed.tools.bench.common import titled
from deepspeed.tools.bench.trained import on_ranks
from deepspeed.zero.module.mapped import identity_of

_SLACK_BYTES = 16 << 20  # of the process: modules, messages, the allocator
_ROWS = ("seconds", "bytes read", "memory grew by")


def _files(folder: str) -> list[Path]:
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} has no *.safetensors files; name the folder of a model")
    return files


def _mapped(folder: str) -> nn.Module:
    """Return a tree of modules, one for every name, whose parameters are those of the files."""
    root = nn.Module()
    for file in _files(folder):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - no mapping
                *path, leaf = name.split(".")
                module = root
                for part in path:
                    if not hasattr(module, part):
                        module.add_module(part, nn.Module())
                    module = module.get_submodule(part)
                values = content.get_tensor(name)
                module.register_parameter(leaf, nn.Parameter(values, requires_grad=False))
    return root


def _read_bytes() -> int:
    rows = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(dict(rows)["rchar"])


def _config(plan: argparse.Namespace) -> dict[str, Any]:
    zero = {"stage": plan.level, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}


def _warm_up(plan: argparse.Namespace) -> Any:
    """Import and build, before the measurement, all that is made once; return transformers, if it is to load."""
    deepspeed.initialize(model=nn.Linear(8, 8), config=_config(plan))[0].destroy()
    client: Any = importlib.import_module("transformers") if plan.transformers else None
    if client is not None:
        with torch.device("meta"):
            client.AutoModelForCausalLM.from_config(client.AutoConfig.from_pretrained(plan.model))
    return client


def on_rank(plan: argparse.Namespace) -> dict[str, float]:
    """Load in a rank; return seconds, bytes read, growth of memory, and sizes."""
    torch.set_num_threads(1)
    client = _warm_up(plan)
    kept = client.integrations.HfDeepSpeedConfig(_config(plan)) if client is not None else None
    comm.barrier()
    hostmem.reset_peak_rss()
    before, read, begun = hostmem.rss_bytes(), _read_bytes(), time.perf_counter()
    model = _mapped(plan.model) if client is None else client.AutoModelForCausalLM.from_pretrained(plan.model)
    sizes = [p.nbytes for p in model.parameters()]
    engine = None if client is not None else deepspeed.initialize(model=model, config=_config(plan))[0]
    comm.barrier()
    facts = (time.perf_counter() - begun, _read_bytes() - read, max(0, hostmem.peak_rss_bytes() - before))
    del kept, engine
    return {**dict(zip(_ROWS, facts, strict=True)), "total": sum(sizes), "largest": max(sizes)}


def measure(plan: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements. Raises UsageError for wrong input, DeepSpeedError, CheckFailedError above the bound."""
    if plan.transformers and plan.level != 3:
        raise UsageError("--transformers loads in shards under ZeRO-3 alone; leave --zero out")
    files = _files(plan.model)
    if plan.transformers and importlib.util.find_spec("transformers") is None:
        raise UsageError("--transformers: the package transformers is not installed; leave the option out")
    ranks = on_ranks(on_rank, plan, per_param=0, alike=(DeepSpeedError, OSError))
    total, largest = ranks[0]["total"], ranks[0]["largest"]
    part = total / plan.ranks if plan.level == 3 else total
    bound = plan.max_rss * part + largest + _SLACK_BYTES
    worst = {name: [rank[name] for rank in ranks] for name in _ROWS}
    stored = sum(identity_of(str(file))[0] for file in files)
    settings = {name: getattr(plan, name) for name in ("model", "ranks", "level", "transformers")}
    facts = {**settings, "files_bytes": stored, "part_bytes": part, "largest_bytes": largest, "bound_bytes": bound} | {
        "seconds": max(worst["seconds"]), "read_bytes": worst["bytes read"], "grew_bytes": worst["memory grew by"],
    }  # fmt: skip
    if (most := max(facts["grew_bytes"])) > bound:
        raise CheckFailedError(f"{as_text(facts, plan)}: above the bound by {size(most - bound)}")
    return facts


def as_text(facts: dict[str, Any], _: argparse.Namespace) -> str:
    read, grew = facts["read_bytes"], facts["grew_bytes"]
    rows = [(str(rank), size(r), size(g)) for rank, (r, g) in enumerate(zip(read, grew, strict=True))]
    how = "from_pretrained under" if facts["transformers"] else "deepspeed.initialize with"
    share, times = size(facts["part_bytes"]), sum(read) / facts["files_bytes"]
    head = f"{facts['model']}: {size(facts['files_bytes'])}, {facts['ranks']} ranks, {how} ZeRO-{facts['level']}"
    tail = (
        f"{facts['seconds']:.2f} s; all ranks together read the files {times:.2f} times; a rank's part is {share}, and "
        f"its memory grew by at most {size(max(grew))} of {size(facts['bound_bytes'])}"
    )
    return titled(head, [("rank", "bytes read", "memory grew by"), *rows], "", tail)
