"""Reinforcement learning (PPO) with four engines in one process: actor, critic, reference and reward model.

    deepspeed --num_gpus 2 examples/rlhf_four_engines.py
    deepspeed --num_gpus 2 examples/rlhf_four_engines.py --layer-by-layer --text notes.txt

takes a minute on two CPU cores that do nothing else, of which the warm-up is half.
Each engine has a ZeRO stage of its own. A tiny GPT first learns Python's own sources byte by byte; a judge prefers
lines that read like prose (small letters and blanks), a reward model learns that from pairs, and PPO then teaches the
actor what the reward model likes, near the reference. Each rank's answers end where its lines end, and states that
nobody needs are put away meanwhile. Writes the plot of reward and divergence to <out>.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig, Linear
from shared import checked, command_line, mean_over_ranks, read_text
from torch import Tensor
from tqdm import tqdm

import deepspeed
import deepspeed.comm as dist

NEWLINE = 10
CLIP, DISCOUNT_OF_GAE, EPOCHS = 0.2, 0.95, 2


class Speaker(GPT):
    """A GPT that samples; the hybrid engine calls its ``generate``."""

    def generate(self, ids: Tensor, max_new_tokens: int) -> Tensor:
        """[batch, time] -> [batch, time + at most ``max_new_tokens``]; ends when every row has ended its line."""
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(max_new_tokens):
            token = torch.multinomial(self(ids)[:, -1].float().softmax(-1), 1).masked_fill(ended[:, None], NEWLINE)
            ids = torch.cat([ids, token], 1)
            ended |= token[:, 0] == NEWLINE
            if ended.all():
                break
        return ids


class Scorer(GPT):
    """A GPT with one number for each position, [batch, time]: a critic's values, or a reward at the last one."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.head = Linear(config.width, 1, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        """Token ids [batch, time] -> [batch, time]."""
        return super().forward(ids)[..., 0].float()


def options(stage: int, lr: float | None, **more: Any) -> dict[str, Any]:
    """A configuration of one of the engines; without a learning rate it has no optimizer."""
    trained = {} if lr is None else {"optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 1000, **more.pop("zero", {})}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **trained, **more}


def answered(rows: Tensor, prompt: int) -> Tensor:
    """Of rows [batch, time], which positions [batch, time - prompt] are the answer: its line with the end of it."""
    ends = (rows[:, prompt:] == NEWLINE).long()
    return ends.cumsum(1) - ends == 0


def judged(rows: Tensor, prompt: int) -> Tensor:
    """What the judge thinks of each answer: the share of small letters and blanks."""
    answer, mask = rows[:, prompt:], answered(rows, prompt)
    likes = ((answer >= ord("a")) & (answer <= ord("z"))) | (answer == ord(" "))
    return (likes & mask).sum(1) / mask.sum(1)


def at_end(scores: Tensor, rows: Tensor, prompt: int) -> Tensor:
    """The score at the end of each answer."""
    return scores.gather(1, prompt - 1 + answered(rows, prompt).sum(1, keepdim=True))[:, 0]


def logs_of(logits: Tensor, rows: Tensor, prompt: int) -> Tensor:
    """Log-probabilities [batch, answer] of the tokens of the answers."""
    logs = logits[:, prompt - 1 : -1].float().log_softmax(-1)
    return logs.gather(2, rows[:, prompt:, None])[..., 0]


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Over the positions of the answers."""
    return (values * mask).sum() / mask.sum()


class Text:
    """Rows of bytes from the text, others on each rank."""

    def __init__(self, args: Any) -> None:
        text = bytearray(read_text(args.text).encode())
        if len(text) < 10 * args.context:
            raise SystemExit(f"the text has {len(text)} bytes; {10 * args.context} are needed")
        self.data = torch.frombuffer(text, dtype=torch.uint8)
        self.batch, self.context = args.batch, args.context
        self.draws = torch.Generator().manual_seed(args.seed + dist.get_rank())

    def rows(self, device: torch.device) -> Tensor:
        """[batch, context]."""
        starts = torch.randint(len(self.data) - self.context, (self.batch,), generator=self.draws)
        return self.data[starts[:, None] + torch.arange(self.context)].long().to(device)


def learn_to_speak(actor: Any, text: Text) -> None:
    """One step of ordinary training."""
    rows = text.rows(actor.device)
    actor.backward(actor(rows[:, :-1], rows[:, 1:]))
    actor.step()


def learn_to_judge(reward: Any, text: Text, prompt: int) -> None:
    """One step on pairs: of two answers the one that the judge prefers gets the higher score (Bradley and Terry)."""
    rows = text.rows(reward.device)
    scores, opinions = at_end(reward(rows), rows, prompt), judged(rows, prompt)
    better = (opinions[:, None] > opinions).float()
    losses = -F.logsigmoid(scores[:, None] - scores) * better
    reward.backward(losses.sum() / better.sum().clamp(min=1))
    reward.step()


def advantages(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (Schulman et al., 2016) without discount, whitened, and the critic's targets."""
    following, result = torch.zeros_like(values[:, 0]), torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        after = values[:, t + 1] * mask[:, t + 1] if t + 1 < values.shape[1] else 0.0
        following = rewards[:, t] + after - values[:, t] + DISCOUNT_OF_GAE * following
        following = following * mask[:, t]
        result[:, t] = following
    centre = mean(result, mask)
    return (result - centre) / (mean((result - centre) ** 2, mask).sqrt() + 1e-6), result + values


def ppo_step(actor: Any, critic: Any, reference: Any, reward: Any, text: Text, args: Any) -> dict[str, float]:
    """Answers to a batch of prompts, what they are worth, and ``EPOCHS`` updates of actor and critic."""
    prompts = text.rows(actor.device)[:, : args.prompt]
    for engine in (actor, critic):  # nobody steps while the actor speaks
        engine.eval()
        engine.offload_states(["optim_states"])
    rows = actor.generate(prompts, max_new_tokens=args.context - args.prompt)
    mask = answered(rows, args.prompt)
    with torch.no_grad():
        before, likely = (logs_of(engine(rows), rows, args.prompt) for engine in (actor, reference))
        values = critic(rows)[:, args.prompt - 1 : -1]
        score = at_end(reward(rows), rows, args.prompt)
    rewards = -args.kl * (before - likely) * mask
    rewards[torch.arange(len(rows)), mask.sum(1) - 1] += score
    gains, targets = advantages(rewards, values, mask)
    for engine in (actor, critic):
        engine.reload_states()
        engine.train()
    for _ in range(EPOCHS):
        ratio = (logs_of(actor(rows), rows, args.prompt) - before).exp()
        actor_loss = mean(-torch.min(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains), mask)
        critic_loss = mean((critic(rows)[:, args.prompt - 1 : -1] - targets) ** 2, mask)
        actor.backward(actor_loss)
        critic.backward(critic_loss)
        critic.step()
        actor.step()
    return {
        "reward": mean_over_ranks(score.mean()),
        "divergence": mean_over_ranks(mean(before - likely, mask)),
        "judge": mean_over_ranks(judged(rows, args.prompt).mean()),
    }


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Reward and divergence over the steps, one above the other, where matplotlib is installed."""
    try:
        import matplotlib  # a plot is the only thing that needs it, and only on one rank
    except ImportError as error:
        tqdm.write(f"no plot: {error}; pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"reward": "reward", "judge": "share that the judge likes", "divergence": "nats per token"}
    figure, axes = pyplot.subplots(len(names), sharex=True, figsize=(7, 7))
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        axis.plot(range(1, len(curves[name]) + 1), curves[name])
        axis.set(ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].set(title=f"PPO with four engines, {dist.get_world_size()} rank(s)")
    axes[-1].set(xlabel="step")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Four engines; three kinds of training."""
    parser = command_line(__doc__, steps=60, lr=1e-3)
    parser.set_defaults(batch=16, context=48)
    parser.add_argument("--prompt", type=int, default=12, help="tokens of a prompt, of the row")
    parser.add_argument("--warm-up", type=int, default=250, help="steps in which actor and reward model learn the text")
    parser.add_argument("--kl", type=float, default=0.05, help="price of a nat by which the actor leaves the reference")
    parser.add_argument("--width", type=int, default=96, help="width of the models")
    parser.add_argument("--layer-by-layer", action="store_true", help="generate without whole weights, for memory")
    args = checked(parser)
    if not 1 <= args.prompt < args.context:
        parser.error(f"--prompt {args.prompt} must be between 1 and --context {args.context}")
    if args.width < 4 or args.width % 4:
        parser.error(f"--width {args.width} must be a multiple of 4, the number of heads")

    torch.manual_seed(args.seed)
    sizes = GPTConfig(context=args.context, width=args.width, layers=2, heads=4)
    hybrid = {"enabled": True, "max_out_tokens": args.context, "pin_parameters": not args.layer_by_layer}
    on_host = {"offload_optimizer": {"device": "cpu"}}
    actor = deepspeed.initialize(model=Speaker(sizes), config=options(3, args.lr, hybrid_engine=hybrid))[0]
    critic = deepspeed.initialize(model=Scorer(sizes), config=options(2, 3e-3, zero=on_host))[0]
    reward = deepspeed.initialize(model=Scorer(sizes), config=options(0, 3e-3))[0]
    text = Text(args)
    torch.manual_seed(args.seed + dist.get_rank())  # of what each rank samples
    for _ in tqdm(range(args.warm_up), desc="warm-up", disable=dist.get_rank() != 0, dynamic_ncols=True):
        learn_to_speak(actor, text)
        learn_to_judge(reward, text, args.prompt)
    frozen = Speaker(sizes)
    for parameter in frozen.parameters():
        parameter.requires_grad = False
    for bucket in actor.stream_weights():  # the reference is the actor as it is now
        for name, values in bucket:
            frozen.get_parameter(name).data.copy_(values)
    reference = deepspeed.initialize(model=frozen, config=options(3, None))[0]
    for engine in (reference, reward):
        engine.eval()
    reward.offload_states(["optim_states", "lp_grads"])  # it has learnt

    curves: dict[str, list[float]] = {"reward": [], "divergence": [], "judge": []}
    with tqdm(total=args.steps, unit="step", disable=dist.get_rank() != 0, dynamic_ncols=True) as bar:
        for _ in range(args.steps):
            for name, value in ppo_step(actor, critic, reference, reward, text, args).items():
                curves[name].append(value)
            bar.set_postfix_str(f"reward {curves['reward'][-1]:.3f}, divergence {curves['divergence'][-1]:.3f}")
            bar.update()

    start = list(b"# This is")[: args.prompt]
    sample = actor.generate(torch.tensor([start], device=actor.device), max_new_tokens=args.context - args.prompt)[0]
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        draw(curves, args.out / "rlhf_four_engines.png")
        few = max(1, args.steps // 6)
        first, last = ({n: sum(c) / few for n, c in part.items()} for part in (
            {n: c[:few] for n, c in curves.items()}, {n: c[-few:] for n, c in curves.items()}
        ))  # fmt: skip
        print(f"\n{bytes(sample.tolist()).decode(errors='replace')!r}")
        judge = f"share that the judge likes {first['judge']:.3f} -> {last['judge']:.3f}"
        course = f"reward {first['reward']:.3f} -> {last['reward']:.3f} in {args.steps} steps"
        print(f"{course}, {judge}, divergence {last['divergence']:.3f} nats per token; see {args.out}")
    for engine in (actor, critic, reference, reward):
        engine.destroy()


if __name__ == "__main__":
    main()
