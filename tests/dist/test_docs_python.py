"""The Python blocks of the pages run, in order, on as many ranks as they speak of; what a page leaves to its reader (a
model, data) stands here.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import RankPool

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(180)

COMMON = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
import deepspeed
import deepspeed.comm as dist

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
    def forward(self, x):
        return x + torch.tanh(self.linear(x))

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), *[Block(16) for _ in range(3)], nn.Linear(16, 4))

Decoder = Model
config = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
torch.manual_seed(0)
"""
# Ranks, and what stands before the blocks of a page.
PAGES = {
    "experts.md": (2, ""),
    "long-sequences.md": (
        2,
        """
def attention(q, k, v):
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
""",
    ),
    "index.md": (
        1,
        """
import json
from pathlib import Path
Path("ds_config.json").write_text(json.dumps(config))
model, loss_of = Model(), lambda output, targets: nn.functional.cross_entropy(output, targets)
loader = [(torch.randn(2, 8), torch.tensor([0, 3])) for _ in range(2)]
""",
    ),
    "quickstart.md": (1, ""),
    "README.md": (1, ""),
    "from-fsdp.md": (
        1,
        "loss_fn = cross_entropy\n"
        "loader = [(torch.randn(2, 8, dtype=torch.bfloat16), torch.tensor([0, 3])) for _ in range(2)]\n",
    ),
    "checkpoints.md": (
        1,
        """
folder = "weights.bin"
torch.save(Model().state_dict(), folder)
class AutoModelForCausalLM:  # weights that are mapped, as those of safetensors files are
    @staticmethod
    def from_pretrained(path):
        with torch.device("meta"):
            model = Model()
        model.load_state_dict(torch.load(path, mmap=True), assign=True)
        return model
""",
    ),
    "elastic.md": (
        1,
        """
config = {**config, "train_batch_size": 2}
class Lossy(Model):
    def forward(self, x):
        return super().forward(x).square().mean()
model, data, updates = Lossy(), torch.randn(8, 8), 0
deepspeed.init_distributed()
""",
    ),
    "offload.md": (
        1,
        """
drive = {"device": "nvme", "nvme_path": "."}
zero = {"stage": 3, "offload_optimizer": drive, "offload_param": {**drive, "max_in_cpu": 0}}
config = {**config, "zero_optimization": zero}
""",
    ),
    "weights.md": (
        2,
        """
class Speaker(Model):
    def generate(self, ids, max_new_tokens):
        return [self(ids) for _ in range(max_new_tokens)]
config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
engine = deepspeed.initialize(model=Speaker(), config=config)[0]
class Server:
    def update(self, name, tensor):
        assert tensor.numel()
server, ids, batch, build = Server(), torch.ones(2, 8), torch.ones(2, 8), Speaker
""",
    ),
    "rl.md": (
        2,
        """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))
class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block(8) for _ in range(3))
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
    def generate(self, ids, max_new_tokens):
        for _ in range(max_new_tokens):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids
class Scorer(Speaker):
    def forward(self, ids):
        return super().forward(ids).mean(-1)
ids = torch.ones(2, 4, dtype=torch.long)
""",
    ),
    "pipeline.md": (
        4,
        """
class Embedding(nn.Embedding):
    pass
vocabulary, width, steps = 16, 8, 2
config = {**config, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4, "train_batch_size": 8}
def rows():
    while True:
        ids = torch.randint(16, (2,))
        yield ids, ids
data_iter = rows()

class Written(nn.Module):  # a decoder that computes its own loss
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block(8) for _ in range(4))
    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
decoder = Written()
def dicts():
    while True:
        ids = torch.randint(16, (2, 4))
        yield {"input_ids": ids, "labels": ids}
batches = dicts()
""",
    ),
}
ELSEWHERE = {"checkpoint-format.md": "tests/dist/test_checkpoint_formats.py"}
# What is left of a run: an engine, perhaps a process with other random numbers.
ENGINES = ("engine", "actor", "critic", "reference")
AFTER = f"for made in [globals().pop(name, None) for name in {ENGINES}]:\n    made is None or made.destroy()\n"


def blocks(page: str) -> list[str]:
    path = ROOT / page if page == "README.md" else ROOT / "docs" / page
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def _run(page: str, folder: str) -> dict[str, Any]:
    """What the blocks leave behind, as far as it is plain."""
    names: dict[str, Any] = {"__name__": "a_page"}
    with _in(folder):
        exec(COMMON + PAGES[page][1], names)
        for number, block in enumerate(blocks(page)):
            exec(compile(block, f"{page}, block {number + 1}", "exec"), names)
            if re.search(r"^\s*engine\b.* = ", block, re.MULTILINE):
                exec(AFTER, names)
        exec(AFTER, names)
        written = sorted(os.listdir("."))
    names.pop("engine", None)
    return {"loss": float(names["loss"].detach().mean()) if "loss" in names else None, "written": written}


@contextlib.contextmanager
def _in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_every_page_with_python_is_run() -> None:
    with_python = {path.name for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if blocks(path.name)}
    assert with_python == {*PAGES, *ELSEWHERE}
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page_runs(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{PAGES[page][0]}")
    for left in pool.run(_run, page, str(tmp_path), time_limit=120):
        assert left["loss"] is None or left["loss"] < 20
        if page in ("quickstart.md", "README.md"):
            assert "ckpt" in left["written"] and left["loss"] is not None and left["loss"] < 0.6
