"""Train a byte-level GPT on the Python standard library's sources, under any ZeRO configuration.

    deepspeed --num_gpus 2 examples/train_gpt.py --deepspeed --deepspeed_config examples/configs/zero3.json

takes about two minutes on two CPU cores that do nothing else, and ends with a sample that reads like code.
The same script runs with torchrun, or alone as ``python examples/train_gpt.py --deepspeed_config ...``. The batch of a
step depends only on the seed and the step, and the configuration fixes its size, so the loss curve depends neither on
the number of ranks nor on the ZeRO configuration. Writes <out>/loss_<config>.json, <out>/sample_<config>.txt and, with
matplotlib, <out>/loss_<config>.png.
"""

import argparse
import json
import math
import re
import resource
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
from gpt import GPT, GPTConfig
from torch import Tensor
from tqdm import tqdm

import deepspeed
import deepspeed.comm as dist

PROMPT = "def "
# The first curve is drawn thin; those over it so that it, and an equal one, can be seen through them.
STYLES = (
    {"linewidth": 1},
    {"marker": "o", "markerfacecolor": "none"},
    {"linestyle": "--", "linewidth": 3, "alpha": 0.6},
)


def code_of(source: str) -> str:
    """A module without comments, blank lines and docstrings: a logical line a line, a tab for each level."""
    bare = re.sub(r"""[rbuf]?("{3}|'{3})[\s\S]*?\1""", "None", source)  # all texts in three quotes
    lines: list[str] = []
    level = 0
    for line in bare.splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip(" "))
        if text in ("", "None") or text.startswith("#"):
            continue
        if lines and (indent > 4 * level + 4 or indent % 4):  # it goes on with the line before
            lines[-1] += f" {text}"
            continue
        level = indent // 4
        lines.append("\t" * min(level, 4) + text)
    return "\n".join([*lines, ""])


class Corpus:
    """The code of the top-level modules of the standard library as bytes; every 16th file is held out."""

    def __init__(self, context: int, seed: int) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(root.glob("*.py"))
        sources = [code_of(path.read_text(encoding="utf-8", errors="replace")).encode() for path in files]
        if sum(map(len, sources)) < 1_000_000:
            raise SystemExit(
                f"train_gpt: less than 1 MB of Python sources in {root}; this example needs a Python with its "
                "standard library as .py files"
            )
        self.context, self.seed = context, seed
        self.train = _as_bytes([text for i, text in enumerate(sources) if i % 16])
        self.held_out = _as_bytes(sources[::16])

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [size, context] of one global training batch, equal on every rank."""
        return self._windows(self.train, size, seed=self.seed * 1_000_003 + step)

    def validation(self, size: int) -> tuple[Tensor, Tensor]:
        """The same ``size`` held-out windows at every call."""
        return self._windows(self.held_out, size, seed=0)

    def _windows(self, data: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - self.context - 1, (size,), generator=torch.Generator().manual_seed(seed))
        windows = data[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


@dataclass
class History:
    """What is written to loss_<config>.json; losses in nats per byte, averaged over all ranks."""

    config: str
    world_size: int
    parameters: int
    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    peak_rss_mib: float = 0.0


def _as_bytes(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


def _mean_over_ranks(value: Tensor) -> float:
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_step(engine: deepspeed.DeepSpeedEngine, corpus: Corpus, step: int) -> float:
    """One optimizer step on this rank's rows of the global batch; returns the loss of the whole batch."""
    accumulation, micro, world = (
        engine.gradient_accumulation_steps(),
        engine.train_micro_batch_size_per_gpu(),
        dist.get_world_size(),
    )
    inputs, targets = corpus.batch(step, accumulation * micro * world)
    loss_sum = torch.zeros((), device=engine.device)
    for i in range(accumulation):
        first = (i * world + dist.get_rank()) * micro
        rows = slice(first, first + micro)
        loss = engine(inputs[rows].to(engine.device), targets[rows].to(engine.device))
        engine.backward(loss)
        engine.step()
        loss_sum += loss.detach()
    return _mean_over_ranks(loss_sum / accumulation)


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, corpus: Corpus, windows: int = 64) -> float:
    """Mean held-out loss; the windows are dealt to the ranks in equal parts."""
    engine.eval()
    per_rank = math.ceil(windows / dist.get_world_size())
    rows = slice(dist.get_rank() * per_rank, (dist.get_rank() + 1) * per_rank)
    inputs, targets = corpus.validation(per_rank * dist.get_world_size())
    loss = engine(inputs[rows].to(engine.device), targets[rows].to(engine.device))
    engine.train()
    return _mean_over_ranks(loss)


@torch.no_grad()
def sample(engine: deepspeed.DeepSpeedEngine, context: int, length: int, seed: int, temperature: float = 0.5) -> str:
    """Continue PROMPT by ``length`` bytes. Every rank draws the same bytes, so that sharded weights are gathered in
    step.
    """
    generator = torch.Generator().manual_seed(seed)
    engine.eval()
    ids = list(PROMPT.encode())
    for _ in range(length):
        logits = engine(torch.tensor([ids[-context:]], device=engine.device))[0, -1].float().cpu()
        ids.append(int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)))
    engine.train()
    return bytes(ids).decode("ascii", errors="backslashreplace").expandtabs(4)


def write_results(history: History, text: str, out: Path) -> None:
    """The loss curve as JSON and, where matplotlib is installed, as PNG; the sample as text."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"loss_{history.config}.json").write_text(json.dumps(asdict(history)) + "\n")
    (out / f"sample_{history.config}.txt").write_text(text + "\n")
    title = f"{history.config}, {history.world_size} rank(s), {history.parameters:,} parameters"
    training = list(enumerate(history.train, 1))
    plot({"training": training, "held out": history.validation}, title, out / f"loss_{history.config}.png")


def plot(curves: dict[str, list[tuple[int, float]]], title: str, path: Path, unit: str = "nats per byte") -> None:
    """Curves of (step, loss) into one picture, where matplotlib is installed."""
    try:
        import matplotlib  # a plot is the only thing that needs it, and only on one rank
    except ImportError as error:
        tqdm.write(f"no plot of the loss: {error}; pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (label, points), style in zip(curves.items(), STYLES, strict=False):
        axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel=unit, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def resume(engine: deepspeed.DeepSpeedEngine, history: History, save: str) -> None:
    """Go on from the newest checkpoint in ``save``, if there is one: on any number of ranks, under any
    configuration.
    """
    path, client = engine.load_checkpoint(save) if save and Path(save).is_dir() else (None, None)
    if path is not None and client is not None:
        history.train, history.validation = client["train"], client["validation"]
        if dist.get_rank() == 0:
            tqdm.write(f"going on from {path}, step {len(history.train)}")


def train(engine: deepspeed.DeepSpeedEngine, corpus: Corpus, history: History, args: argparse.Namespace) -> None:
    """The training loop: fills ``history`` and draws the progress bar on rank 0."""
    tokens_per_step, process = engine.train_batch_size() * args.context, psutil.Process()
    resume(engine, history, args.save)
    first = len(history.train)
    if not first:
        history.validation.append((0, evaluate(engine, corpus)))
    trained_seconds = 0.0
    bar_options = {"disable": dist.get_rank() != 0, "dynamic_ncols": True}
    if not sys.stderr.isatty():  # a file keeps each picture of the bar
        bar_options["mininterval"] = 10.0
    with tqdm(total=args.steps, initial=first, unit="step", **bar_options) as bar:
        for step in range(first, args.steps):
            start = time.perf_counter()
            history.train.append(train_step(engine, corpus, step))
            trained_seconds += time.perf_counter() - start
            speed = tokens_per_step * (step + 1 - first) / trained_seconds
            if (step + 1) % args.eval_interval == 0 or step + 1 == args.steps:
                history.validation.append((step + 1, evaluate(engine, corpus)))
                if args.save:
                    engine.save_checkpoint(
                        args.save, client_state={"train": history.train, "validation": history.validation}
                    )
            measured, held_out = history.validation[-1]
            losses = f"loss {history.train[-1]:.3f} held-out {held_out:.3f} (step {measured})"
            bar.set_postfix_str(f"{losses} {speed:,.0f} tok/s {process.memory_info().rss >> 20} MiB", refresh=False)
            bar.update()
    done = max(0, args.steps - first)
    history.seconds, history.tokens_per_second = (
        round(trained_seconds, 2),
        round(tokens_per_step * done / max(trained_seconds, 1e-9), 1),
    )
    history.peak_rss_mib = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=1600, help="optimizer steps; keep the scheduler's total_num_steps equal to it"
    )
    parser.add_argument(
        "--eval-interval", type=int, default=100, help="steps between two measurements on held-out files"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights, the batches and the sample")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the curve, its plot and the sample")
    parser.add_argument(
        "--save",
        default="",
        help="folder for checkpoints, one at each measurement; a run that finds one goes on from it",
    )
    parser.add_argument("--sample-bytes", type=int, default=400, help="length of the text sample")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes a prediction may look back")
    parser.add_argument("--checkpoint", action="store_true", help="recompute every block in the backward")
    parser.add_argument("--tied", action="store_true", help="one matrix for the embedding and the head")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers")
    args = deepspeed.add_config_arguments(parser).parse_args()
    if args.deepspeed_config is None:
        parser.error("no configuration: give --deepspeed_config FILE, for example examples/configs/zero3.json")
    if not Path(args.deepspeed_config).is_file():
        parser.error(f"the configuration {args.deepspeed_config} does not exist (looked from {Path.cwd()})")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if min(args.steps, args.eval_interval, args.sample_bytes) < 1:
        parser.error("--steps, --eval-interval and --sample-bytes must be at least 1")
    return args


def main() -> None:
    """Build, train, report."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(256, args.context, args.width, args.layers, args.heads, args.tied, args.checkpoint))
    parameters = sum(p.numel() for p in model.parameters())
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    corpus = Corpus(args.context, args.seed)
    history = History(Path(args.deepspeed_config).stem, dist.get_world_size(), parameters)
    train(engine, corpus, history, args)
    text = sample(engine, args.context, args.sample_bytes, args.seed)
    if dist.get_rank() == 0:
        write_results(history, text, args.out)
        tqdm.write(
            f"\n{text}\n\nheld-out loss {history.validation[-1][1]:.4f} nats per byte after {args.steps} steps "
            f"in {history.seconds:.0f} s"
        )
        tqdm.write(f"wrote {', '.join(str(path) for path in sorted(args.out.glob(f'*_{history.config}.*')))}")
    engine.destroy()


if __name__ == "__main__":
    main()
