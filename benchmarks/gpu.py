"""One GPU: the fused kernels beside the device's bandwidth, the same model trained in many ways with what its steps
wait for and hide, an out-of-memory drill, and the largest model that trains.

    python benchmarks/gpu.py --plan                  what would run in which command, and its expected seconds
    python benchmarks/gpu.py --command 1 --out FILE  kernels, checks, eager cases; 2: compiled and accumulating cases;
                                                     3: the largest model. Each in under ten minutes
    python benchmarks/gpu.py --quick                 the same with tiny models: does it run?
    python benchmarks/gpu.py --dry                   tiny models on the CPU: is the script right?
    python benchmarks/gpu.py --parts train --cases zero3 fsdp2 --folder /local_nvme

Every case is a process of its own with a time limit; one that fails is a row that says why. JSON lines go to stdout as
they come, the tables at the end; ``--out`` adds the rows to the JSON file that benchmarks/gpu_predicted.py puts beside
the predictions. Without CUDA: a sentence on stderr and exit status 2.

GB/s of the kernels count 28 bytes an element (weights, gradient, two moments in; weights and moments out; fp32), those
of the copy what is read and what is written. TFLOP/s count 6 operations per parameter outside the embedding tables and
token, and 6 x layers x width per token and position for causal attention; recomputation is not counted. A step
takes the time of several without waits between, divided. "Plain PyTorch": fp32 weights, bf16 autocast and fused AdamW.
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
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import gpu_cases as table
import gpu_watch
import psutil
from gpu_cases import CASES, LARGE, QUICK_LARGE, QUICK_TRAIN, TRAIN, Shape

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
LEFT_FOR_OTHERS = 4 * GIB  # of host memory; a child is stopped before the machine has less
# --- in the children ---


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """GB/s of a device copy, of our FusedAdam and of torch's fused AdamW, alternating."""
    import torch

    from deepspeed.accelerator.device import get_accelerator
    from deepspeed.accelerator.native.spec import FUSED_ADAM
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.optim import cuda

    numel = args.numel // 64 * 64
    source, target = (torch.empty(2 * numel, device=args.on) for _ in range(2))
    runs: dict[str, tuple[int, Callable[[], object]]] = {"copy": (16 * numel, lambda: target.copy_(source))}
    for name, cls, more in (("ours", FusedAdam, {}), ("torch", torch.optim.AdamW, {"fused": True})):
        params = [torch.nn.Parameter(torch.randn(numel // 64, device=args.on)) for _ in range(64)]
        for param in params:
            param.grad = torch.randn_like(param)
        runs[name] = (28 * numel, cls(params, lr=1e-3, weight_decay=0.01, **more).step)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(args.rounds + 3):
        for name, (nbytes, work) in runs.items():
            begin, end = (get_accelerator().Event(enable_timing=True) for _ in range(2))
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
        "native_kernel": cuda.usable(FUSED_ADAM, [[source]] * 4),  # parameter, gradient and moments of its kind
    }


Work = Callable[[], None]


def _of_torch(case: table.Case, model: Any, device: Any) -> tuple[Callable[[Any, Any], None], Work]:
    """Forward with backward, and the update, of plain PyTorch or FSDP2."""
    import torch

    if case.sharded:
        import torch.distributed as dist
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def learn(ids: Any, targets: Any) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=not case.sharded):
            loss = model(ids, targets)
        (loss / case.accumulation).backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return learn, update


def build(args: argparse.Namespace, shape: Shape) -> tuple[Work, dict[str, Any], Any]:
    """One step (all of its micro-batches), what there is to say about the model, and what has to live as long."""
    import torch
    from gpt import GPT, GPTConfig

    case, device = CASES[args.mode], torch.device(args.on)
    sizes = GPTConfig(
        shape.vocab, shape.context, shape.width, shape.layers, max(1, shape.width // 128), checkpoint=shape.checkpoint
    )
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randint(shape.vocab, (shape.batch, shape.context + 1), generator=generator).to(device) for _ in range(4)
    ]
    torch.manual_seed(0)
    said: dict[str, Any] = {}
    keeps: Any = None
    if case.zero is None:
        with device:
            model = GPT(sizes)
        _compile_blocks(model, case)
        learn, update = _of_torch(case, model, device)
    else:
        import deepspeed

        cfg = table.config(case, args.folder, shape.batch, args.host_limit)
        remote = case.zero.get("offload_param", {}).get("device")
        with deepspeed.zero.Init(remote_device=remote, config_dict_or_path=cfg, enabled=case.zero["stage"] == 3):
            model = GPT(sizes)
        keeps = engine = deepspeed.initialize(model=model, config=cfg)[0]
        if case.compiled:
            engine.compile()
        plan = engine.memory_plan()
        said = {"planned_gib": {place: round(getattr(plan, place) / GIB, 2) for place in ("device", "host", "drive")}}
        said["places"] = engine.places()
        update = engine.step

        def learn(ids: Any, targets: Any) -> None:
            engine.backward(engine(ids, targets))

    numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())

    def step() -> None:
        for micro in range(case.accumulation):
            ids = batches[micro % len(batches)]
            learn(ids[:, :-1], ids[:, 1:])
            if case.zero is not None or micro == case.accumulation - 1:
                update()

    return step, {"parameters": numel, **said}, keeps


def _compile_blocks(model: Any, case: table.Case) -> None:
    for block in model.blocks if case.compiled else ():
        block.compile()


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Some steps of one case: seconds, memory, and what they wait for and hide."""
    import torch

    from deepspeed.accelerator.device import get_accelerator

    shape, device, on_device = Shape(**json.loads(args.shape)), get_accelerator(), args.on == "cuda"
    if args.device_gib:
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, args.device_gib * GIB / torch.cuda.get_device_properties(0).total_memory)
        )
    began = time.perf_counter()
    step, found, _keeps = build(args, shape)
    device.synchronize()
    built = time.perf_counter() - began
    for _ in range(args.warmup):
        step()
    device.synchronize()
    device.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(args.steps):
        step()
    device.synchronize()
    seconds = (time.perf_counter() - began) / args.steps
    micro_batches = CASES[args.mode].accumulation
    found |= {
        "layers": shape.layers,
        "step_s": round(seconds, 4),
        "tokens_per_s": round(micro_batches * shape.tokens / seconds, 1),
        "tflops": round(micro_batches * shape.flops / seconds / 1e12, 1),
        "peak_device_gib": round(device.max_memory_allocated() / GIB, 2),
        "reserved_gib": round(device.max_memory_reserved() / GIB, 2),
        "retries": device.memory_stats().get("num_alloc_retries", 0),
        "peak_host_gib": round(_peak_host() / GIB, 2),
        "build_s": round(built, 1),
        "threads": torch.get_num_threads(),
    }
    if CASES[args.mode].compiled:
        found["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
    if on_device and args.watch:
        found |= gpu_watch.waits(step)
        found |= gpu_watch.overlap(step)
    return found


def checks(args: argparse.Namespace) -> dict[str, Any]:
    """Out of memory in a forward, and training goes on as if that batch had not been; steps that wait for nothing."""
    import torch

    import deepspeed
    from deepspeed.accelerator.device import get_accelerator

    device = torch.device(args.on)

    def losses(*, drill: bool) -> tuple[list[float], str]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        cfg = table.config(CASES["zero3"], args.folder, 8) | {"gradient_clipping": 0.0}
        engine = deepspeed.initialize(model=model, config=cfg)[0]
        found, raised = [], ""
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            batch = torch.randn(8, 256, generator=generator).to(device, torch.bfloat16)
            if drill and number == 2:
                handle = engine.module[1].register_forward_pre_hook(_too_much)
                try:
                    engine(batch)
                except torch.OutOfMemoryError as error:
                    raised = type(error).__name__
                handle.remove()
            loss = engine(batch).float().square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.destroy()
        return found, raised

    plain, (drilled, raised) = losses(drill=False)[0], losses(drill=True)
    found: dict[str, Any] = {"oom_raised": raised, "oom_recovered": bool(raised) and plain == drilled}
    if args.on == "cuda":
        args.mode, args.shape = "zero3", json.dumps(dataclasses.asdict(QUICK_TRAIN))
        step, _, _keeps = build(args, QUICK_TRAIN)
        for _ in range(4):
            step()
        get_accelerator().synchronize()
        found |= gpu_watch.waits(step)  # one with clipping: the norm
    return found


def _too_much(module: Any, inputs: Any) -> None:
    """More memory than any device has; on the CPU, which has no such error, the error."""
    import torch

    device = inputs[0].device
    if device.type == "cpu":
        raise torch.OutOfMemoryError("a drill")
    torch.empty(1 << 44, dtype=torch.uint8, device=device)


def _peak_host() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def child(args: argparse.Namespace) -> None:
    """One case; prints RESULT and one JSON object."""
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    try:
        found = {"kernels": kernels, "train": train, "checks": checks}[args.case](args)
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
    """The same model in every case."""
    shape, rows = QUICK_TRAIN if args.quick else TRAIN, []
    predicted = table.read(table.PREDICTED)
    for mode in args.cases:
        warmup, steps = CASES[mode].steps(quick=args.quick)
        options = {"mode": mode, "shape": json.dumps(dataclasses.asdict(shape)), "folder": args.folder, "on": args.on}
        limit = max(60.0, 2.5 * table.case_s(mode, predicted, quick=args.quick))
        found = launch("train", min(clock.left(), limit), **options, warmup=warmup, steps=steps, watch=1)
        rows.append(tell({"part": "train", "mode": mode, **found}))
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
                "on": args.on,
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
    header: list[object] = ["", "step, s", "tokens/s", "TFLOP/s", "device peak, GiB", "reserved, GiB", "host peak, GiB"]
    header += ["waits a step", "device busy", "copies hidden", "graph breaks"]
    keys = ("step_s", "tokens_per_s", "tflops", "peak_device_gib", "reserved_gib", "peak_host_gib")
    keys += ("waits_per_step", "gpu_busy", "copies_hidden", "graph_breaks")
    body: list[list[object]] = [
        [CASES[r["mode"]].title, *([r["failed"], *[""] * 9] if "failed" in r else [r.get(k, "") for k in keys])]
        for r in rows
    ]
    numel = next((r["parameters"] for r in rows if "parameters" in r), 0)
    return f"{numel:,} parameters\n\n" + _markdown(header, body)


def checks_text(row: dict[str, Any]) -> str:
    """The drill and the waits, in words."""
    if "failed" in row:
        return f"Checks: {row['failed']}"
    recovered = "training went on bit for bit" if row["oom_recovered"] else "TRAINING DID NOT GO ON AS BEFORE"
    text = f"Out of memory: {row['oom_raised'] or 'NOT RAISED'}; {recovered}."
    return text + (f" Waits a step of ZeRO-3: {row['waits_per_step']}, {row['waits']}." if "waits" in row else "")


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
        body.append(
            [CASES[row["mode"]].title, row["device_gib"], numel, *(row.get(k, "") for k in keys), row["stopped_by"]]
        )
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
    parser.add_argument("--plan", action="store_true", help="print what would run and how long it is expected to take")
    parser.add_argument("--command", choices=tuple(table.COMMANDS), default=None, help="parts and cases of one command")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, without what only a device can do")
    parser.add_argument("--parts", nargs="+", choices=table.PARTS, default=None)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=None, help="of part `train`")
    parser.add_argument("--out", type=Path, default=None, help="add the rows to this JSON file")
    parser.add_argument("--folder", default=None, help="on the drive for the NVMe cases (default: a temporary folder)")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything; what does not fit says so")
    parser.add_argument("--probe-seconds", type=float, default=90.0, help="at most for one model of part `largest`")
    parser.add_argument(
        "--device-gib-list", nargs="+", type=float, default=[0.0, 24.0], help="part `largest`: of the device; 0 for all"
    )
    hidden = argparse.SUPPRESS
    parser.add_argument("--case", choices=("kernels", "train", "checks"), default=None, help=hidden)
    parser.add_argument("--mode", choices=tuple(CASES), default="torch", help=hidden)
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda", help=hidden)
    for name, default in (("shape", ""), ("device-gib", 0.0), ("host-limit", 0), ("numel", 200_000_000)):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=hidden)
    for name, number in (("rounds", 15), ("warmup", 2), ("steps", 5), ("watch", 0)):
        parser.add_argument(f"--{name}", type=int, default=number, help=hidden)
    args = parser.parse_args(argv)
    if args.command and (args.parts or args.cases):
        parser.error("--command says which parts and cases run: leave --parts and --cases out")
    parts, cases = table.COMMANDS[args.command or "1"]
    args.parts = args.parts or parts.split()
    args.cases = args.cases or list(cases or table.EAGER)
    if args.dry:
        args.quick, args.on, args.parts = True, "cpu", [p for p in args.parts if p != "largest"]
    return args


def show_plan(args: argparse.Namespace) -> int:
    """Print the plan, of all commands if none was chosen; 1 where one does not fit."""
    predicted, status = table.read(table.PREDICTED), 0
    chosen = {args.command or "chosen": (args.parts, args.cases)}
    if not (args.command or args.dry or {"--parts", "--cases"} & set(sys.argv)):
        chosen = {name: (parts.split(), list(cases)) for name, (parts, cases) in table.COMMANDS.items()}
    for name, (parts, cases) in chosen.items():
        rows = table.plan(parts, cases, predicted, quick=args.quick)
        sys.stdout.write(f"command {name}\n{table.plan_text(rows, table.COMMAND_S)}\n\n")
        status |= sum(seconds for *_, seconds in rows) > table.COMMAND_S
    return status


def write_out(path: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add rows to the file, a newer one of a case in the place of an older; those of another device go."""
    before = table.read(path)
    kept = before if before.get("machine") == about else {}
    cases = kept.get("cases", {}) | {row["mode"]: row for row in rows if row["part"] == "train"}
    others = kept.get("others", {}) | {row["part"]: row for row in rows if row["part"] in ("kernels", "checks")}
    date = datetime.now(timezone.utc).date().isoformat()
    path.write_text(json.dumps({"machine": about, "date": date, "cases": cases, "others": others}, indent=1) + "\n")


def run(args: argparse.Namespace, clock: Clock) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows and the tables of every part."""
    rows: list[dict[str, Any]] = []
    tables = []
    if "kernels" in args.parts:
        sizes = {"numel": 1 << 20, "rounds": 3} if args.quick else {}
        # the first use compiles the kernel, where it was not carried here prebuilt
        found = launch("kernels", min(clock.left(), 120), on=args.on, **sizes)
        rows.append(tell({"part": "kernels", **found}))
        tables.append("### Kernels\n\n" + kernel_table(rows[-1]))
    if "checks" in args.parts:
        found = launch("checks", min(clock.left(), 100), folder=args.folder, on=args.on)
        rows.append(tell({"part": "checks", **found}))
        tables.append("### Checks\n\n" + checks_text(rows[-1]))
    if "train" in args.parts:
        trained = compare_training(args, clock)
        rows += trained
        tables.append("### The same model\n\n" + train_table(trained))
    if "largest" in args.parts:
        rows += (found_largest := largest(args, clock))
        tables.append("### The largest model\n\n" + largest_table(found_largest))
    return rows, tables


def main() -> int:
    """Parse, run, print; 0, or 2 without CUDA."""
    args = parse()
    if args.plan:
        return show_plan(args)
    import torch

    if args.on == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("gpu.py measures a CUDA device, and torch sees none here; --plan and --dry need none\n")
        return 2
    if args.case:
        child(args)
    about = {"part": "machine", "device": "cpu", "torch": torch.__version__} if args.on == "cpu" else machine()
    tell(about)
    with tempfile.TemporaryDirectory(prefix="ds_gpu_") as own:
        args.folder = args.folder or own
        rows, tables = run(args, Clock(60 * args.minutes))
    if args.out:
        write_out(args.out, about, rows)
    sys.stdout.write("\n" + "\n\n".join(tables) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
