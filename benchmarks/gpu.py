"""One GPU: the fused kernels beside the device's bandwidth, training steps with and without offload, and the largest
model that trains.

    python benchmarks/gpu.py                    everything, in under ten minutes
    python benchmarks/gpu.py --quick            the same with tiny models: does it run?
    python benchmarks/gpu.py --parts kernels train --folder /local_nvme

Every case is a process of its own with a time limit; one that fails is a row that says why. JSON lines go to stdout as
they come, the tables at the end. Without CUDA: a sentence on stderr and exit status 2.

GB/s of the kernels count 28 bytes an element (weights, gradient, two moments in; weights and moments out; fp32), those
of the copy what is read and what is written. TFLOP/s count 6 operations per parameter outside the embedding tables and
token, and 6 x layers x width per token and position for causal attention; recomputation is not counted. "Optimizer" is
what a step takes after the backward has ended.
"Plain PyTorch" has fp32 weights, bf16 autocast and fused AdamW.
"""

import argparse
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
LEFT_FOR_OTHERS = 4 * GIB  # of host memory; a child is stopped before the machine has less
MODES = {
    "torch": "plain PyTorch AdamW",
    "zero3": "ZeRO-3",
    "cpu": "ZeRO-3, optimizer and parameters in host memory",
    "half": "ZeRO-3, half of the optimizer in host memory",
    "zero_offload": "ZeRO-Offload (stage 2, optimizer in host memory)",
    "nvme": "ZeRO-3, optimizer and parameters on NVMe",
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT and its micro-batch; ``checkpoint`` recomputes blocks in the backward."""

    layers: int
    width: int
    context: int
    vocab: int
    batch: int
    checkpoint: bool = False

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * self.context

    @property
    def flops(self) -> float:
        """Operations of one step, forward and backward."""
        inside = self.layers * (12 * self.width**2 + 13 * self.width) + self.vocab * self.width
        return self.tokens * (6.0 * inside + 6.0 * self.layers * self.width * self.context)


TRAIN = Shape(layers=16, width=2048, context=1024, vocab=50_304, batch=8)
LARGE = Shape(layers=0, width=4096, context=512, vocab=8_192, batch=1, checkpoint=True)
QUICK_TRAIN = Shape(layers=2, width=256, context=128, vocab=512, batch=2)
QUICK_LARGE = dataclasses.replace(QUICK_TRAIN, layers=0, batch=1, checkpoint=True)


# --- in the children ---


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """GB/s of a device copy, of our FusedAdam and of torch's fused AdamW, alternating."""
    import torch

    from deepspeed.native.spec import FUSED_ADAM
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.optim import cuda

    numel = args.numel // 64 * 64
    source, target = (torch.empty(2 * numel, device="cuda") for _ in range(2))
    runs: dict[str, tuple[int, Callable[[], object]]] = {"copy": (16 * numel, lambda: target.copy_(source))}
    for name, cls, more in (("ours", FusedAdam, {}), ("torch", torch.optim.AdamW, {"fused": True})):
        params = [torch.nn.Parameter(torch.randn(numel // 64, device="cuda")) for _ in range(64)]
        for param in params:
            param.grad = torch.randn_like(param)
        runs[name] = (28 * numel, cls(params, lr=1e-3, weight_decay=0.01, **more).step)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(args.rounds + 3):
        for name, (nbytes, work) in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(5):  # so that the host's share of one launch does not count
                work()
            end.record()
            end.synchronize()
            if number >= 3:
                rates[name].append(5 * nbytes / begin.elapsed_time(end) / 1e6)
    found = {f"{name}_gbs": round(median(values), 1) for name, values in rates.items()}
    return {
        "elements": numel,
        **found,
        "ours_share_of_copy": round(found["ours_gbs"] / found["copy_gbs"], 3),
        "torch_share_of_copy": round(found["torch_gbs"] / found["copy_gbs"], 3),
        "native_kernel": cuda.usable(FUSED_ADAM, [source]),
    }


def config(mode: str, folder: str, batch: int, host_limit: int) -> dict[str, Any]:
    """The engine's configuration of a mode."""
    cpu, drive = {"device": "cpu"}, {"device": "nvme", "nvme_path": folder}
    zero: dict[str, Any] = {
        "zero3": {"stage": 3},
        "zero_offload": {"stage": 2, "offload_optimizer": cpu},
        "cpu": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu},
        "half": {"stage": 3, "offload_optimizer": {**cpu, "ratio": 0.5}},
        "nvme": {"stage": 3, "offload_optimizer": drive, "offload_param": {**drive, "max_in_cpu": 0}},
    }[mode]
    return {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": zero,
        **({"memory": {"host_limit": host_limit}} if host_limit else {}),
    }


def build(
    args: argparse.Namespace, shape: Shape
) -> tuple[Callable[[Any, Any], None], Callable[[], None], dict[str, Any]]:
    """Forward with backward, the update, and what there is to say about the model."""
    import torch
    from gpt import GPT, GPTConfig

    heads = max(1, shape.width // 128)
    sizes = GPTConfig(shape.vocab, shape.context, shape.width, shape.layers, heads, checkpoint=shape.checkpoint)
    torch.manual_seed(0)
    if args.mode == "torch":
        with torch.device("cuda"):
            model = GPT(sizes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

        def learn(ids: Any, targets: Any) -> None:
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                loss = model(ids, targets)
            loss.backward()

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return learn, update, {"parameters": sum(p.numel() for p in model.parameters())}

    import deepspeed

    cfg = config(args.mode, args.folder, shape.batch, args.host_limit)
    remote = {"cpu": "cpu", "nvme": "nvme"}.get(args.mode)
    with deepspeed.zero.Init(
        remote_device=remote, config_dict_or_path=cfg, enabled=cfg["zero_optimization"]["stage"] == 3
    ):
        model = GPT(sizes)
    engine = deepspeed.initialize(model=model, config=cfg)[0]
    plan = engine.memory_plan()
    said = {"planned_gib": {place: round(getattr(plan, place) / GIB, 2) for place in ("device", "host", "drive")}}
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())

    def learn_sharded(ids: Any, targets: Any) -> None:
        engine.backward(engine(ids, targets))

    return learn_sharded, engine.step, {"parameters": numel, **said, "places": engine.places()}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Some steps of one mode: seconds, tokens, memory."""
    import torch

    shape = Shape(**json.loads(args.shape))
    if args.device_gib:
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, args.device_gib * GIB / torch.cuda.get_device_properties(0).total_memory)
        )
    began = time.perf_counter()
    learn, update, found = build(args, shape)
    torch.cuda.synchronize()
    built = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    steps, updates = [], []
    for number in range(args.warmup + args.steps):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(shape.vocab, (shape.batch, shape.context + 1), generator=generator).cuda()
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        learn(ids[:, :-1], ids[:, 1:])
        torch.cuda.synchronize()
        t1 = time.perf_counter()
        update()
        torch.cuda.synchronize()
        steps.append(time.perf_counter() - t0)
        updates.append(time.perf_counter() - t1)
    step = median(steps[args.warmup :])
    return {
        **found,
        "layers": shape.layers,
        "step_s": round(step, 4),
        "optimizer_s": round(median(updates[args.warmup :]), 4),
        "tokens_per_s": round(shape.tokens / step, 1),
        "tflops": round(shape.flops / step / 1e12, 1),
        "peak_device_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "peak_host_gib": round(_peak_host() / GIB, 2),
        "build_s": round(built, 1),
        "threads": torch.get_num_threads(),
    }


def _peak_host() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def child(args: argparse.Namespace) -> None:
    """One case; prints RESULT and one JSON object."""
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    try:
        found = kernels(args) if args.case == "kernels" else train(args)
    except torch.OutOfMemoryError:
        found = {"failed": "out of device memory"}
    except Exception as error:  # a row that says so
        text = str(error).strip().splitlines() or [""]
        found = {"failed": f"{type(error).__name__}: {text[0][:160]}", "detail": text[1:20]}
    gc.collect()
    sys.stdout.write("RESULT " + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what a failed case left half built need not be taken down in order


# --- in the parent ---


class Clock:
    """The time that is left for everything."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def _watch(process: "subprocess.Popen[str]", said: list[str]) -> None:
    """Stop a child that takes the machine's last host memory."""
    while process.poll() is None:
        if psutil.virtual_memory().available < LEFT_FOR_OTHERS:
            said.append("stopped: out of host memory")
            os.killpg(process.pid, signal.SIGKILL)
            return
        time.sleep(0.2)


def launch(case: str, seconds: float, **options: Any) -> dict[str, Any]:
    """One child; its figures, or ``failed`` with the reason."""
    if seconds < 5:
        return {"failed": "no time left"}
    command = [sys.executable, __file__, "--case", case]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    env |= {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "DS_LOG_LEVEL": "WARNING"}
    said: list[str] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, start_new_session=True
        )
        threading.Thread(target=_watch, args=(process, said), daemon=True).start()
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            said.append(f"stopped after {seconds:.0f} s")
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        errors.seek(0)
        last = errors.read().strip().splitlines()[-3:]
    results = [line.partition("RESULT ")[2] for line in out.splitlines() if line.startswith("RESULT ")]
    if results and not said:
        found: dict[str, Any] = json.loads(results[-1])
        return found
    return {"failed": said[0] if said else f"ended with status {process.returncode}", "detail": last}


def tell(row: dict[str, Any]) -> dict[str, Any]:
    """Print one JSON line."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    return row


def compare_training(args: argparse.Namespace, clock: Clock) -> list[dict[str, Any]]:
    """The same model in every mode."""
    shape = QUICK_TRAIN if args.quick else TRAIN
    rows = []
    for mode in ("torch", "zero3", "zero_offload", "cpu", "nvme"):
        options = {"mode": mode, "shape": json.dumps(dataclasses.asdict(shape)), "folder": args.folder}
        steps = {"warmup": 1, "steps": 2} if mode == "nvme" or args.quick else {"warmup": 2, "steps": 5}
        rows.append(
            tell({"part": "train", "mode": mode, **launch("train", min(clock.left(), 100), **options, **steps)})
        )
    return rows


def largest(args: argparse.Namespace, clock: Clock) -> list[dict[str, Any]]:
    """For each contender the last model of a doubling series that trained, and what stopped the next one; they take
    turns.
    """
    contenders = [(mode, gib) for gib in args.device_gib_list for mode in ("torch", "cpu", "nvme")]
    contenders[2:2] = [("half", 0.0)] if 0.0 in args.device_gib_list else []
    base, layers = (QUICK_LARGE, 2) if args.quick else (LARGE, 8)
    rows = {c: {"part": "largest", "mode": c[0], "device_gib": c[1] or "all"} for c in contenders}
    going = list(contenders)
    while going and layers <= (4 if args.quick else 4096):
        shape = json.dumps(dataclasses.asdict(dataclasses.replace(base, layers=layers)))
        for contender in list(going):
            mode, gib = contender
            options = {
                "mode": mode,
                "shape": shape,
                "folder": args.folder,
                "device_gib": gib,
                "host_limit": host_limit(),
            }
            found = launch("train", min(clock.left(), args.probe_seconds), warmup=0, steps=1, **options)
            tell({"part": "probe", "mode": mode, "device_gib": gib or "all", "layers": layers, **found})
            if "failed" in found:
                rows[contender]["stopped_by"] = f"{found['failed']} at {layers} layers"
                going.remove(contender)
            else:
                rows[contender] |= found
        layers *= 2
    for contender in going:
        rows[contender]["stopped_by"] = "the end of the series"
    return [tell(row) for row in rows.values()]


def host_limit() -> int:
    """Bytes of host memory that a plan may use: what is free now, without a reserve."""
    return max(GIB, psutil.virtual_memory().available - 2 * LEFT_FOR_OTHERS)


def _cells(values: list[object]) -> str:
    return "| " + " | ".join(str(v) for v in values) + " |"


def _markdown(header: list[object], rows: list[list[object]]) -> str:
    return "\n".join([_cells(header), "|" + "---|" * len(header), *(_cells(row) for row in rows)])


def kernel_table(row: dict[str, Any]) -> str:
    """Part (a)."""
    if "failed" in row:
        return f"Kernels: {row['failed']}"
    names = (("copy on the device", "copy"), ("FusedAdam", "ours"), ("torch AdamW, fused", "torch"))
    rows: list[list[object]] = [
        [name, row[f"{key}_gbs"], f"{row[f'{key}_gbs'] / row['copy_gbs']:.3f}"] for name, key in names
    ]
    note = "" if row["native_kernel"] else "\n\nThe native kernel could not be built here; FusedAdam ran on torch's."
    return _markdown([f"{row['elements']:,} elements, fp32", "GB/s", "of the copy"], rows) + note


def train_table(rows: list[dict[str, Any]]) -> str:
    """Part (b)."""
    header: list[object] = ["", "step, s", "tokens/s", "TFLOP/s", "optimizer, s", "device peak, GiB", "host peak, GiB"]
    keys = ("step_s", "tokens_per_s", "tflops", "optimizer_s", "peak_device_gib", "peak_host_gib")
    body = [
        [MODES[r["mode"]], *([r[k] for k in keys] if "failed" not in r else [r["failed"], *[""] * 5])] for r in rows
    ]
    numel = next((r["parameters"] for r in rows if "parameters" in r), 0)
    return f"{numel:,} parameters\n\n" + _markdown(header, body)


def largest_table(rows: list[dict[str, Any]]) -> str:
    """Part (c)."""
    header: list[object] = [
        "",
        "device memory, GiB",
        "parameters",
        "layers",
        "step, s",
        "TFLOP/s",
        "device peak, GiB",
        "what stopped the next",
    ]
    keys = ("layers", "step_s", "tflops", "peak_device_gib")
    body: list[list[object]] = []
    for row in rows:
        numel = f"{row['parameters'] / 1e9:.2f} billion" if "parameters" in row else "none"
        body.append([MODES[row["mode"]], row["device_gib"], numel, *(row.get(k, "") for k in keys), row["stopped_by"]])
    return _markdown(header, body)


def machine() -> dict[str, Any]:
    """What it ran on."""
    import torch

    device = torch.cuda.get_device_properties(0)
    return {
        "part": "machine",
        "device": device.name,
        "device_gib": round(device.total_memory / GIB, 1),
        "host_gib": round(psutil.virtual_memory().total / GIB, 1),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, the children's too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument(
        "--parts", nargs="+", choices=("kernels", "train", "largest"), default=["kernels", "train", "largest"]
    )
    parser.add_argument("--folder", default=None, help="on the drive for the NVMe cases (default: a temporary folder)")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="for everything; what does not fit is a row that says so"
    )
    parser.add_argument(
        "--probe-seconds", type=float, default=90.0, help="at most for one model of the series of part `largest`"
    )
    parser.add_argument(
        "--device-gib-list",
        nargs="+",
        type=float,
        default=[0.0, 24.0],
        help="part `largest`: memory of the device to use; 0 for all",
    )
    hidden = argparse.SUPPRESS
    parser.add_argument("--case", choices=("kernels", "train"), default=None, help=hidden)
    parser.add_argument("--mode", choices=tuple(MODES), default="torch", help=hidden)
    parser.add_argument("--shape", default="", help=hidden)
    parser.add_argument("--device-gib", type=float, default=0.0, help=hidden)
    parser.add_argument("--host-limit", type=int, default=0, help=hidden)
    parser.add_argument("--numel", type=int, default=200_000_000, help=hidden)
    parser.add_argument("--rounds", type=int, default=15, help=hidden)
    parser.add_argument("--warmup", type=int, default=2, help=hidden)
    parser.add_argument("--steps", type=int, default=5, help=hidden)
    return parser.parse_args(argv)


def main() -> int:
    """Parse, run, print; 0, or 2 without CUDA."""
    args = parse()
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write("gpu.py measures a CUDA device, and torch sees none here\n")
        return 2
    if args.case:
        child(args)
    clock = Clock(60 * args.minutes)
    tell(machine())
    tables = []
    with tempfile.TemporaryDirectory(prefix="ds_gpu_") as own:
        args.folder = args.folder or own
        if "kernels" in args.parts:
            sizes = {"numel": 1 << 20, "rounds": 3} if args.quick else {}
            # the first use compiles the kernel
            row = tell({"part": "kernels", **launch("kernels", min(clock.left(), 120), **sizes)})
            tables.append("### Kernels\n\n" + kernel_table(row))
        if "train" in args.parts:
            tables.append("### The same model\n\n" + train_table(compare_training(args, clock)))
        if "largest" in args.parts:
            tables.append("### The largest model\n\n" + largest_table(largest(args, clock)))
    sys.stdout.write("\n" + "\n\n".join(tables) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
