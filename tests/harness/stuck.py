"""A training script of which one rank goes wrong at step 3: ``stuck.py FAULT --folder DIR``; started by launchers.

It writes the moment of the fault to ``DIR/fault``. Used by tests/dist/test_hang.py and benchmarks/hang.py.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import os
import re
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm import collectives
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.tensor.differentiable import exchange_rows
from deepspeed.tier.aio import AioEngine

SCRIPT = os.path.abspath(__file__)
FAULTS = {
    "none": "nothing goes wrong",
    "raises": "one rank raises in its loop, and a thread of its own keeps its process alive",
    "raises_and_waits": "one rank raises in a layer, in a block whose end waits for ever",
    "loops": "one rank is in an endless loop in a layer",
    "stops": "one rank is stopped by SIGSTOP",
    "other_model": "one rank runs a layer twice, with a sum over all ranks in it",
    "fewer": "one rank has fewer batches and goes on to a barrier",
    "branch": "a sum of the user's in a branch that one rank skips",
    "sequence": "one rank does not enter an exchange of a sequence",
    "attention": "one rank does not enter an attention over ranks of a group of the user's",
    "drive": "a read of a drive does not come back",
    "loader": "a worker of one rank's loader does not answer",
    "loader_dies": "a worker of one rank's loader dies",
    "loader_dies_within": "a worker of one rank's loader dies while that rank sends to the others",
    "order": "two sums of the user's in another order",
    "wait": "one rank waits for a sum that it has started without the others",
    "silent": "one rank is in native code that keeps the interpreter",
}


# What the report has to say of rank 1, which goes wrong, and in the lines that do not begin with it.
WORDS = {
    "raises": (r"rank 1 .*raised ValueError: the data is bad \(stuck.py:\d+ in _go_wrong", r"ranks? .*wait"),
    "raises_and_waits": (r"rank 1 .*raised ValueError: the data is bad in layers.1 \(stuck.py:\d+ in forward", r"wait"),
    "loops": (r"rank 1 .*runs code outside collectives in layers.1 \(stuck.py:\d+ in spin\), step 3", r"wait.*layers"),
    "stops": (r"rank 1 .*is stopped \(SIGSTOP\)", r"wait"),
    "other_model": (r"rank 1 .*waits in all_reduce of 3 float32 in layers.1 \(stuck.py", r"wait.*behind rank 1"),
    "fewer": (r"rank 1 .*waits in barrier \(stuck.py", r"wait.*behind rank 1"),
    "branch": (r"rank 1 .*waits.*behind rank 0", r"waits? in all_reduce of 3 float32 in layers.1 \(stuck.py"),
    "sequence": (r"rank 1 .*waits.*", r"waits? in all_to_all of \d+ float32 .*in layers.1"),
    "attention": (
        r"rank 1 .*waits.*",
        r"waits? in all_gather of \d+ int64 .*on sequence_process_group in DistributedAttention",
    ),
    "drive": (r"rank 1 .*waits for a drive: (reading|writing) \d+ bytes at offset \d+ of /.*layers", r"wait"),
    "loader": (
        r"rank 1 .*waits for a batch of its data loader: worker 0 \(pid \d+\) runs",
        r"wait",
    ),
    "loader_dies": (  # torch raises that wherever the rank is; or, if that was caught there, when the loader asks again
        r"rank 1 .*(raised RuntimeError: DataLoader worker \(pid(\(s\))? \d+\) exited unexpectedly"
        r"|waits for a batch of its data loader: worker 0 \(pid \d+\) has ended)",
        r"wait",
    ),
    "loader_dies_within": (r"rank 1 .*raised RuntimeError: DataLoader worker \(pid \d+\) is killed", r"wait"),
    "order": (
        r"different orders: number \d+ of the group 'default' is .*barrier",
        r"waits? in (barrier|all_reduce of 4 )",
    ),
    "wait": (r"rank 1 .*waits in .*work.wait\(\) \(stuck.py", r"wait"),
    "silent": (r"rank 1 .*does not answer: native code keeps its interpreter", r"wait"),
}


# Of a fault that may also end its rank at once, before anybody has waited for long, what the launcher says then.
_ENDS = r"rank 1 \(pid \d+\) failed first[\s\S]*RuntimeError: DataLoader worker \(pid(\(s\))? \d+\) "
ENDS = {"loader_dies": _ENDS + "exited", "loader_dies_within": _ENDS + "is killed"}
# Where the engine sends one half of an exchange and has begun the other: code that counts as its own.
_WITHIN = """
def isend(*arguments, **words):
    if died:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, died.pop(), os.WEXITED | os.WNOWAIT)
    return send(*arguments, **words)
"""


def ends_at_once(fault: str, status: int, text: str) -> bool:
    """Whether the job has ended as one whose rank raises, and ``text`` names the rank and the error."""
    return status == 1 and fault in ENDS and re.search(ENDS[fault], text) is not None


def spin() -> None:
    """An endless loop of the user's."""
    count = 0
    while True:
        count += 1


class Layer(nn.Module):
    """Residual layer that may go wrong."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.fault = nn.Linear(width, width), nn.Linear(width, width), ""
        self.group: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "loops":
            spin()
        if self.fault in ("branch", "other_model"):
            dist.all_reduce(torch.ones(3))
        if self.fault == "sequence":
            heads = self.up.weight._ds_unit.keeper.mesh.sp
            exchange_rows(torch.ones(heads.size, 3), heads, sent=[1] * heads.size, received=[1] * heads.size)
        if self.fault == "attention":
            attend = DistributedAttention(lambda q, k, v: q + k + v, self.group)
            attend(*(torch.ones(3, 1, self.group.size(), 2),) * 3, batch_dim_idx=1)
        if self.fault == "raises_and_waits":
            try:
                raise ValueError("the data is bad")
            finally:
                time.sleep(600)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Three layers and a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(3)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean()


def _note_fault(folder: str) -> None:
    """The moment of the fault, unless it is known."""
    with contextlib.suppress(FileExistsError), open(os.path.join(folder, "fault"), "x") as file:
        file.write(repr(time.time()))


class Samples(torch.utils.data.Dataset):
    """Random rows; behind the sixth batch a worker may go wrong."""

    def __init__(self, fault: str, folder: str) -> None:
        self.fault, self.folder = fault, folder

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 6 and self.fault == "loader":
            time.sleep(600)
        if index >= 6 and self.fault == "loader_dies":  # while the loader reads ahead, in an earlier step
            _note_fault(self.folder)
            os._exit(1)
        return torch.randn(16)


def _drive_hangs() -> None:
    for thing in gc.get_objects():
        if type(thing) is AioEngine:
            thing._calls.wait = functools.partial(ctypes.CDLL(None).sleep, 600)


def _dies_within(pid: int) -> None:
    """Kill a worker as soon as the engine sends."""
    names: dict[str, Any] = {"os": os, "signal": signal, "pid": pid, "died": [pid], "send": dist.isend}
    exec(compile(_WITHIN, collectives.__file__, "exec"), names)
    dist.isend = names["isend"]


def _go_wrong(fault: str, model: Any, *, faulty: bool) -> None:
    """Step 3 begins; what most faults are, on all ranks."""
    values = torch.ones(4)
    if fault == "order":
        first, second = (dist.all_reduce, dist.barrier)[:: -1 if faulty else 1]
        first(*([values] if first is dist.all_reduce else []))
        second(*([values] if second is dist.all_reduce else []))
    of_faulty = ("loops", "other_model", "raises_and_waits")
    if fault in (of_faulty if faulty else ("attention", "branch", "sequence")):
        model.layers[1].fault = fault
    if not faulty:
        return
    if fault == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "silent":
        ctypes.PyDLL(None).sleep(600)
    if fault == "drive":
        _drive_hangs()
    if fault == "wait":
        work = dist.all_reduce(values, async_op=True)
        work.wait()
    if fault == "raises":
        threading.Thread(target=time.sleep, args=(600,), name="uploader").start()
        raise ValueError("the data is bad")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--hang_timeout", type=float)
    parser.add_argument("--local_rank", type=int)
    options = parser.parse_args()
    fault, rank = options.fault, int(os.environ["RANK"])
    faulty = rank == options.rank
    torch.manual_seed(0)
    zero: dict[str, Any] = {"stage": options.stage, "stage3_param_persistence_threshold": 0}
    if fault == "drive":
        zero["offload_param"] = {"device": "nvme", "nvme_path": options.folder, "max_in_cpu": 0}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}
    config |= {"zero_optimization": zero, "hang_timeout": options.hang_timeout}
    if fault in ("attention", "sequence"):  # without parameters that are on their way at the same time
        zero["stage"] = 1
    if fault == "sequence":
        config["sequence_parallel_size"] = int(os.environ["WORLD_SIZE"])
    engine, *_ = deepspeed.initialize(model=Model(), config=config)
    engine.module.layers[1].group = dist.new_group(list(range(dist.get_world_size())))
    with open(os.path.join(options.folder, f"pid{rank}"), "w") as file:
        file.write(str(os.getpid()))
    batches: Any = None
    if fault.startswith("loader"):
        samples = Samples(fault if faulty else "", options.folder)
        batches = iter(torch.utils.data.DataLoader(samples, batch_size=2, num_workers=1, prefetch_factor=1))
    for step in range(options.steps):
        if step == 3:
            if faulty:
                _note_fault(options.folder)
                if fault == "fewer":
                    break
            _go_wrong(fault, engine.module, faulty=faulty)
            if faulty and fault == "loader_dies_within":
                _dies_within(batches._workers[0].pid)
            time.sleep(options.pause)
        x = torch.randn(2, 16) if batches is None else next(batches)
        engine.backward(engine(x))
        engine.step()
    if fault == "fewer" and faulty:
        dist.barrier()
    engine.destroy()
    sys.stdout.write(f"rank {rank} done\n")


if __name__ == "__main__":
    main()
