"""A plain one-process trainer that can be told what happens to it: the right answer, written without the engine."""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.client.lr_schedules import WarmupLR
from deepspeed.tools.verify.models import SAMPLES, MicroBatch
from deepspeed.tools.verify.reference import clip_factor, global_norm
from tests.fuzz import models
from tests.fuzz.draw import Case
from tests.harness import pipes
from tests.harness.optimizers import BY_NAME, CLIENT, CONFIG_TYPE
from tests.harness.reference16 import lowered

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP = {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 3, "warmup_type": "linear"}


def grouped(case: Case, params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """The groups of the optimizer, with names in place of parameters."""
    names = [name for name, p in params.items() if p.requires_grad]
    if case.groups == "one":
        return [{"params": names}]
    if case.groups == "partial":  # the others require a gradient, and are not trained
        names = [name for i, name in enumerate(names) if i % 4 != 3]
    flat = [name for name in names if params[name].dim() < 2]
    other = [name for name in names if params[name].dim() >= 2]
    return [group for group in ({"params": other}, {"params": flat, "lr": 2e-3}) if group["params"]]


def optimizer_of(case: Case, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Of the plain trainer, or the client's own."""
    name = case.optimizer
    if name == "client Adagrad":
        return torch.optim.Adagrad(groups, lr=1e-2, eps=1e-2)
    factory, settings = CLIENT[name[7:]] if name.startswith("client ") else BY_NAME[name][1:]
    return factory(groups, **settings)


def optimizer_block(case: Case) -> dict[str, Any]:
    """The same in the engine's configuration."""
    if case.optimizer.startswith("client "):
        return {}
    settings = dict(BY_NAME[case.optimizer][0])
    settings |= {"betas": list(settings["betas"])} if "betas" in settings else {}
    return {"optimizer": {"type": CONFIG_TYPE.get(case.optimizer, case.optimizer), "params": settings}}


def step_schedule(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule of the client's."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def config_of(case: Case, gas: int, folder: str) -> dict[str, Any]:
    """The configuration of a case."""
    zero = dict(case.zero)
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device") == "nvme":
            zero[name] = {**zero[name], "nvme_path": folder}
    top = {"gradient_clipping": 0.0, **case.top, **optimizer_block(case)}
    if case.dtype != "fp32":
        block = {"enabled": True}
        if case.dtype == "fp16":
            block |= {"initial_scale_power": 12, "loss_scale_window": 3, "hysteresis": 1}
        top |= {case.dtype: block, "communication_data_type": "fp32"}
    if case.schedule == "WarmupLR":
        top["scheduler"] = {"type": "WarmupLR", "params": WARM_UP}
    if case.tokens:
        top["normalize"] = "tokens"
    if case.front == "llama":
        top["tensor_parallel"] = {"autotp_size": 2}
    micro = pipes.SAMPLES if case.front == "pipe" else 2 if case.front == "llama" else SAMPLES
    always = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": gas}
    return {**always, "zero_optimization": zero, "zero_allow_untested_optimizer": True, **top}


class Plain:
    """``world`` ranks in one process. A gradient is the mean over ranks, times the loss scale until the update."""

    def __init__(self, case: Case, world: int) -> None:
        self.case, self.world = case, world
        self.model = lowered(models.build(case).train(), DTYPES[case.dtype])
        self.params = dict(self.model.named_parameters())
        for param in self.params.values():  # as the engine has them: products in 16 bits depend on strides
            param.data = param.data.contiguous()
        self.dtype = next(p.dtype for n, p in self.params.items() if "norm" not in n)
        self.begin()

    def begin(self) -> None:
        """As ``initialize`` does: masters are the weights, the optimizer is new."""
        groups = grouped(self.case, self.params)
        trained = {name for group in groups for name in group["params"]}
        # also of fp32 weights, which a delayed update shows late
        self.masters = {n: self.params[n].detach().float().clone() for n in trained}
        self.optimizer = optimizer_of(
            self.case, [{**group, "params": [self.masters[n] for n in group["params"]]} for group in groups]
        )
        self.schedule = None
        if self.case.schedule:
            client = self.case.schedule == "client"
            self.schedule = step_schedule(self.optimizer) if client else WarmupLR(self.optimizer, **WARM_UP)
        self.ambiguous: dict[str, Tensor] = {}
        self.drop()

    def drop(self) -> None:
        """The window begins anew."""
        self.grads = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.required: set[str] = set()
        self.tokens = 0

    def places(self, step: int, micro: int) -> Iterator[MicroBatch]:
        """Of all ranks."""
        yield from (MicroBatch(step, micro, rank, self.world) for rank in range(self.world))

    def losses(self, place: MicroBatch) -> list[Tensor]:
        """Of one forward. Masters follow what it has written, and keep their bits elsewhere."""
        losses = models.losses_of(self.case, self.model, place, self.dtype)
        for name, master in self.masters.items():
            if name.endswith("clamped.weight"):
                with torch.no_grad():
                    shown = self.params[name]
                    master.copy_(torch.where(master.to(shown.dtype) == shown, master, shown.to(master.dtype)))
        return losses

    def micro(self, step: int, micro: int, *, gas: int, how: str, scale: float) -> list[list[float]]:
        """One micro-batch on all ranks; their losses."""
        told = []
        for place in self.places(step, micro):
            losses = self.losses(place)
            told.append([float(loss.detach()) for loss in losses])
            for loss in losses:
                count = tokens_of(place) if self.case.tokens else 0
                self.tokens += count
                given = loss * float("inf") if how == "overflow" else loss
                for _ in range(2 if how == "twice" else 1):
                    # loss.backward() past the engine: what it gives is weighed
                    weight, rest = (count, self.world) if count else (1 / gas, 1)
                    weight, rest = (1, weight * rest) if how == "plain" else (weight, rest)
                    self._backward(given * weight * scale, rest / self.world)
        return told

    def _backward(self, loss: Tensor, weight: float) -> None:
        """Add in fp32: a weight gets a gradient of each part of a graph that runs by itself."""

        def collect(name: str, param: Tensor) -> None:
            self.grads[name] += param.grad.float() * weight
            param.grad = None

        trained = [(n, p) for n, p in self.params.items() if p.requires_grad and n in self.masters]
        self.required |= {name for name, _ in trained}
        hooks = [p.register_post_accumulate_grad_hook(functools.partial(collect, n)) for n, p in trained]
        loss.backward(retain_graph=True)
        for hook in hooks:
            hook.remove()
        for param in self.params.values():
            param.grad = None

    def mean_gradient(self, name: str, scale: float) -> Tensor:
        """As ``safe_get_full_grad`` has it."""
        return self.grads[name] / scale / (self.tokens or 1)

    def update(self, scale: float) -> float:
        """One update; the norm before clipping, inf where nothing was updated."""
        grads = {name: self.mean_gradient(name, scale) for name in self.masters if name in self.required}
        self.ambiguous = self._signs_of_nothing(grads)
        norm = global_norm(grads)
        self.drop()
        if not math.isfinite(norm):
            if self.case.late == "delayed":  # what the update before has left
                self.show()
            return math.inf
        divisor = clip_factor(norm, float(self.case.top.get("gradient_clipping", 0.0)))
        before = {name: master.clone() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            master.grad = grads[name] / divisor if name in grads else None
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.show(before if self.case.late == "delayed" else self.masters)
        return norm

    def _signs_of_nothing(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Where Lion takes the sign of what is zero but for rounding."""
        if self.case.optimizer != "Lion":
            return {}
        found = {}
        for name, grad in grads.items():
            m = self.optimizer.state.get(self.masters[name], {}).get("m", torch.zeros_like(grad))
            u = 0.9 * m + 0.1 * grad
            found[name] = (u.abs() < 1e-6) & (u != 0).any()  # zero for all of a parameter that had no part in it
        return found

    def show(self, values: dict[str, Tensor] | None = None) -> None:
        """Weights become ``values`` (default: the masters), rounded."""
        with torch.no_grad():
            for name, value in (self.masters if values is None else values).items():
                self.params[name].copy_(value)

    def write(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """A client writes a weight; its master follows."""
        with torch.no_grad():
            self.params[name].copy_(change(self.params[name].detach()))
            if name in self.masters:
                self.masters[name].copy_(self.params[name])

    def slots(self, name: str) -> dict[str, Tensor]:
        """The optimizer's, by the names that the engine has for them."""
        if self.case.optimizer == "Lamb":  # whose slots have other names here
            return {}
        names = {"m": "exp_avg"} if self.case.optimizer == "Lion" else {}
        state = self.optimizer.state.get(self.masters[name], {})
        return {names.get(k, k): v for k, v in state.items() if isinstance(v, Tensor) and k != "step"}

    def snapshot(self) -> Any:
        """All that a checkpoint holds."""
        weights = {name: p.detach().clone() for name, p in self.params.items()}
        masters = {name: m.clone() for name, m in self.masters.items()}
        schedule = None if self.schedule is None else copy.deepcopy(self.schedule.state_dict())
        return weights, masters, copy.deepcopy(self.optimizer.state_dict()), schedule

    def restore(self, taken: Any) -> None:
        """Of a snapshot."""
        weights, masters, optimizer, schedule = taken
        with torch.no_grad():
            for name, value in weights.items():
                self.params[name].copy_(value)
            for name in self.masters.keys() & masters.keys():
                self.masters[name].copy_(masters[name])
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        if self.schedule is not None:
            self.schedule.load_state_dict(copy.deepcopy(schedule))
        self.drop()


def tokens_of(place: MicroBatch) -> int:
    """The number of tokens of a micro-batch."""
    return 1 + place.seed() % 5
