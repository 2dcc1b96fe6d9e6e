"""The five native learning-rate schedules, and the choice between them and torch's by name.

Counting: ``last_batch_iteration`` i is the number of ``step()`` calls minus one, so i = -1 at construction. Stepping
follows the optimizer's update, so update number k (from 1) runs with the rate for i = k - 2.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from deepspeed.errors import UsageError, nearest_hint
from deepspeed.monitor.log import logger
from deepspeed.optim.base import constructor
from deepspeed.optim.registry import check_numbers, class_of_torch, construct

Settings = dict[str, Any]


def get_torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer itself, or the one in a wrapper's ``.optimizer``; ``TypeError`` when there is none."""
    inner = optimizer
    while inner is not None and not isinstance(inner, torch.optim.Optimizer):
        inner = getattr(inner, "optimizer", None)
    if inner is None:
        reason = "is not a torch.optim.Optimizer and has none in its attribute 'optimizer'"
        raise TypeError(f"{type(optimizer).__name__} {reason}")
    return inner


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Write a learning rate into each group."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):  # compiled and captured steps hold that tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def build_scheduler(type_name: str, params: Mapping[str, Any] | None, optimizer: Any) -> Any:
    """Build the schedule that ``scheduler.type`` and ``scheduler.params`` of the config describe.

    ``type_name`` is one of ``VALID_LR_SCHEDULES``, or a class name of ``torch.optim.lr_scheduler``; case matters. The
    schedule writes to the torch optimizer that ``optimizer`` is or wraps. Raises OptimizerConfigError (a ValueError)
    for an unknown name or key, a missing key or a value of the wrong type, ValueError for one out of range.
    """
    base, theirs = get_torch_optimizer(optimizer), torch.optim.lr_scheduler
    cls = _CLASSES.get(type_name) or class_of_torch("scheduler", type_name, theirs, theirs.LRScheduler, _CLASSES)
    check_numbers("scheduler.params", params or {})
    return construct("scheduler", type_name, cls, base, params or {})


class LRSchedule:
    """Base of the native schedules: the counter, writing rates into the groups, and saving. A subclass names its
    ``keywords`` with their defaults, prepares what it was given, its ``settings``, and states its formula in
    ``_rates``. The initial rate is written at once, unless ``last_batch_iteration`` is other than -1.
    """

    keywords: ClassVar[Settings]
    _prepare: Callable[[], None]
    _rates: Callable[[int], list[float]]
    """Learning rate of each group at an iteration (-1 before the first step)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "keywords" in vars(cls):
            settings = cls.keywords | {"last_batch_iteration": -1}
            cls.__init__ = constructor("optimizer", settings, LRSchedule._build)  # type: ignore[method-assign]

    def _build(self, optimizer: Any, settings: Settings) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration, self.settings = settings.pop("last_batch_iteration"), settings
        self._last_lr: list[float] | None = None
        self._prepare()
        self._start()

    def _write(self, iteration: int) -> None:
        self._last_lr = self._rates(iteration)
        set_rates(self.optimizer, self._last_lr)

    def _start(self) -> None:
        if self.last_batch_iteration == -1:
            self._write(-1)

    def get_lr(self) -> list[float]:
        """Return the rate of each group at the present iteration."""
        return self._rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the rates last written to the groups; ``UsageError`` (an ``AssertionError``) before the first."""
        if self._last_lr is None:
            raise UsageError(f"{type(self).__name__}: need to call step() first; no learning rate has been written yet")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or jump to the given one, and write its rates."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._write(self.last_batch_iteration)

    def state_dict(self) -> dict[str, Any]:
        """Return the counter; everything else is configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Restore the counter and write its rates: the next update is right even where only the schedule is loaded."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        if self.last_batch_iteration >= 0:
            self._write(self.last_batch_iteration)
        else:
            self._start()

    def _per_group(self, name: str) -> list[float]:
        value, count = self.settings[name], len(self.optimizer.param_groups)
        values = [value] * count if isinstance(value, int | float) else list(value)
        if len(values) != count:
            text = f"{name} has {len(values)} entries, the optimizer has {count} parameter groups"
            raise ValueError(f"{type(self).__name__}: {text}")
        return values

    def _whole_number(self, name: str, *, least: int) -> int:
        """Return an int setting, or a float such as 1e3 that is whole, as int; ``ValueError`` otherwise."""
        value = self.settings[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or int(value) != value or value < least:
            raise ValueError(f"{type(self).__name__}: {name} is {value!r}, it must be a whole number >= {least}")
        return int(value)


class LRRangeTest(LRSchedule):
    """``lr = min_lr * (1 + step_rate * x)``, ``x = (i + 1) / step_size``, floored if ``staircase`` (Smith 2017, 2018).

    Raises ValueError where ``lr_range_test_step_size`` is not a positive whole number.
    """

    keywords = {
        **{"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000},
        **{"lr_range_test_step_rate": 1.0, "lr_range_test_staircase": False},
    }

    def _prepare(self) -> None:
        _, _, self.step_rate, self.staircase = self.settings.values()
        self.min_lr = self._per_group("lr_range_test_min_lr")
        self.step_size = self._whole_number("lr_range_test_step_size", least=1)

    def _rates(self, iteration: int) -> list[float]:
        interval = (iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * factor for rate in self.min_lr]


class OneCycle(LRSchedule):
    """Rates climb and fall once, momentum the other way round, then both decay (Smith 2018, "A disciplined approach").

    With stair counts the climb and the fall go in that many steps. Momentum means ``betas[0]`` of each group; it is
    left alone, with a warning, when the optimizer has no ``betas``. Raises ValueError where ``cycle_first_step_size``
    is not positive or ``cycle_second_step_size`` negative.
    """

    keywords = {
        **{"cycle_min_lr": ..., "cycle_max_lr": ..., "decay_lr_rate": 0.0},
        **{"cycle_first_step_size": 2000, "cycle_second_step_size": None},
        **{"cycle_first_stair_count": 0, "cycle_second_stair_count": None, "decay_step_size": 0},
        **{"cycle_momentum": True, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0},
    }

    def _prepare(self) -> None:
        settings = self.settings
        first, second = settings["cycle_first_step_size"], settings["cycle_second_step_size"]
        second = first if second is None else second
        if first <= 0 or second < 0:
            text = f"cycle_first_step_size must be positive (is {first})"
            raise ValueError(f"OneCycle: {text} and cycle_second_step_size not negative (is {second})")
        self.first_size, self.total_size = float(first), float(first + second)
        stairs, second_stairs = max(settings["cycle_first_stair_count"] or 0, 0), settings["cycle_second_stair_count"]
        second_stairs = stairs if second_stairs is None else max(second_stairs, 0)
        self.stairs = (stairs or second_stairs, second_stairs or stairs)
        self.decay_lr_rate, self.decay_mom_rate = settings["decay_lr_rate"], settings["decay_mom_rate"]
        self.decay_step_size = settings["decay_step_size"]
        names = ("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom")
        self.min_lrs, self.max_lrs, self.min_moms, self.max_moms = map(self._per_group, names)
        has_betas = all("betas" in group for group in self.optimizer.param_groups)
        self.cycle_momentum = settings["cycle_momentum"] and has_betas
        if settings["cycle_momentum"] and not has_betas:
            logger.warning("OneCycle: %s has no betas, so its momentum is not cycled", type(self.optimizer).__name__)

    def _start(self) -> None:
        super()._start()
        if self.last_batch_iteration == -1:
            # the first update uses the low momentum, although the formula begins at the high one; runs depend on it
            self._write_momentum(self.min_moms)

    def _write(self, iteration: int) -> None:
        super()._write(iteration)
        self._write_momentum(self._momenta(iteration))

    def _momenta(self, iteration: int) -> list[float]:
        place, decay = self._place(iteration, self.decay_mom_rate)
        pairs = zip(self.min_moms, self.max_moms, strict=True)
        return [(high - (high - low) * place) * decay for low, high in pairs]

    def _write_momentum(self, momenta: list[float]) -> None:
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, *group["betas"][1:])

    def get_mom(self) -> list[tuple[float, ...]]:
        """Return the betas of each group at the present iteration, by the formula; empty without cycled momentum."""
        pairs = zip(self._momenta(self.last_batch_iteration), self.optimizer.param_groups, strict=True)
        return [(momentum, *group["betas"][1:]) for momentum, group in pairs] if self.cycle_momentum else []

    def _place(self, iteration: int, decay_rate: float) -> tuple[float, float]:
        """Return 0 (ends of the cycle) to 1 (top); and 1, or ``1 + rate * d / size`` at ``d`` iterations after it."""
        total, batch, size = self.total_size, iteration + 1, self.decay_step_size
        if iteration >= total:
            return 0.0, 1 + decay_rate * (iteration - total + 1) / size if decay_rate and size else 1.0
        if any(self.stairs):
            place = batch % total
            climbing = place <= self.first_size
            count, length = self.stairs[not climbing], self.first_size if climbing else total - self.first_size
            # whole numbers until here: 0.29 * 100 is below 29
            return math.floor((place if climbing else total - place) * count / length) / count, 1.0
        x = 1 + batch / total - math.floor(1 + batch / total)
        top = self.first_size / total
        return x / top if x <= top else (x - 1) / (top - 1), 1.0

    def _rates(self, iteration: int) -> list[float]:
        place, decay = self._place(iteration, self.decay_lr_rate)
        return [(low + (high - low) * place) / decay for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class _Warmup(LRSchedule):
    """``g(i)``: from 0 to 1 over ``W = max(2, warmup_num_steps)`` iterations, as ``ln(i+1)/ln(W)`` or ``i/W``."""

    def _prepare(self) -> None:
        name, kind = type(self).__name__, self.settings["warmup_type"]
        count = self._whole_number("warmup_num_steps", least=0)
        if count == 0:
            logger.warning("%s: warmup_num_steps is 0, 1 is used", name)
        if kind not in ("log", "linear"):
            logger.warning("%s: warmup_type %r is unknown, 'log' is used", name, kind)
        self.warmup_num_steps, self.warmup_type = max(2, count), "linear" if kind == "linear" else "log"
        self.total_num_steps = self.settings.get("total_num_steps", math.inf)
        if self.total_num_steps < self.warmup_num_steps:
            text = "%s: total_num_steps %s is less than warmup_num_steps %s"
            logger.warning(text, name, self.total_num_steps, self.warmup_num_steps)
        self._own_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _gamma(self, iteration: int) -> float:
        if iteration >= self.warmup_num_steps:
            return 1.0
        steps = self.warmup_num_steps
        return iteration / steps if self.warmup_type == "linear" else math.log(iteration + 1) / math.log(steps)


class WarmupLR(_Warmup):
    """``lr = min_lr + (max_lr - min_lr) * g(i)``, then constant. ``warmup_max_lr`` None means each group's own rate.

    Raises ValueError where ``warmup_num_steps`` is negative or no whole number (0 counts as 1, with a warning).
    """

    keywords = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}

    def _prepare(self) -> None:
        super()._prepare()
        self.min_lrs = self._per_group("warmup_min_lr")
        self.max_lrs = self._own_lrs if self.settings["warmup_max_lr"] is None else self._per_group("warmup_max_lr")

    def get_lr(self) -> list[float]:
        """Return the rate of each group at the present iteration; warn before the first step."""
        if self.last_batch_iteration < 0:
            text = "%s: asked for the learning rate before the first step(); it is the minimum"
            logger.warning(text, type(self).__name__)
        return super().get_lr()

    def _rates(self, iteration: int) -> list[float]:
        gamma = self._gamma(iteration) if iteration >= 0 else 0.0
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """As ``WarmupLR``, then linearly down: ``g(i) = max(0, (T - i) / max(1, T - W))`` for ``i >= W``."""

    keywords = {"total_num_steps": ..., **WarmupLR.keywords, "warmup_max_lr": 0.001}

    def _gamma(self, iteration: int) -> float:
        steps, total = self.warmup_num_steps, self.total_num_steps
        falling = max(0.0, (total - iteration) / max(1.0, total - steps))
        return super()._gamma(iteration) if iteration < steps else falling


class WarmupCosineLR(_Warmup):
    """Each group's own rate times ``min_ratio + (1 - min_ratio) * g(i)``, then a half cosine down to ``cos_min_ratio``.

    ``p = min(1, (i - W + 1) / max(1, T - W))``; ``ratio = cos_min + (1 - cos_min) * (1 + cos(pi * p)) / 2``; 0 for i <
    0. Raises ValueError as ``WarmupLR``.
    """

    keywords = {"total_num_steps": ..., "warmup_min_ratio": 0.0, "warmup_num_steps": 1000, "cos_min_ratio": 0.0001}
    keywords |= {"warmup_type": "log"}

    def _prepare(self) -> None:
        self.warmup_min_ratio, self.cos_min_ratio = self.settings["warmup_min_ratio"], self.settings["cos_min_ratio"]
        super()._prepare()

    def get_lr_ratio(self) -> float:
        """Return the factor on every group's own rate at the present iteration."""
        return self._ratio(self.last_batch_iteration)

    def _ratio(self, iteration: int) -> float:
        steps, total = self.warmup_num_steps, self.total_num_steps
        start, end = self.warmup_min_ratio, self.cos_min_ratio
        if iteration < 0:
            return 0.0
        if iteration < steps:
            return start + (1 - start) * self._gamma(iteration)
        progress = min(1.0, (iteration - steps + 1) / max(1, total - steps))
        return max(0.0, end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2)

    def _rates(self, iteration: int) -> list[float]:
        ratio = self._ratio(iteration)
        return [rate * ratio for rate in self._own_lrs]


_CLASSES: Mapping[str, type[LRSchedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(_CLASSES)
# Where the command line has another default than the schedule; -1 means "not given".
_CLI_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("lr_range_test_step_size", "cycle_first_step_size", "decay_step_size"), 1000),
    **dict.fromkeys(("cycle_first_stair_count", "cycle_second_step_size", "cycle_second_stair_count"), -1),
    **dict.fromkeys(("cycle_min_lr", "warmup_min_ratio", "cos_min_ratio"), 0.01),
    **{"cycle_max_lr": 0.1, "cycle_momentum": False, "warmup_max_lr": 0.001},
}


_ON_COMMAND_LINE: Mapping[str, Settings] = {
    name: {key: _CLI_DEFAULTS.get(key, default) for key, default in cls.keywords.items()}
    for name, cls in _CLASSES.items()
}


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text.lower() in ("true", "1")


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and the settings of every native schedule; returns the parser."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    names = ", ".join(VALID_LR_SCHEDULES)
    group.add_argument("--lr_schedule", type=str, default=None, help=f"learning-rate schedule: {names}")
    owner = {key: name for name in reversed(VALID_LR_SCHEDULES) for key in _ON_COMMAND_LINE[name]}
    del owner["total_num_steps"]
    for key, schedule in owner.items():
        default = _ON_COMMAND_LINE[schedule][key]
        kind: Any = {"type": _bool if isinstance(default, bool) else type(default)}
        kind = {"action": "store_true"} if key == "cycle_momentum" else kind
        group.add_argument(f"--{key}", default=default, help=f"{schedule}: {key}", **kind)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the tuning arguments of this process's command line; also return the remaining arguments."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _given(args: argparse.Namespace, *names: str) -> Settings:
    """Return the settings of these schedules in ``args``, but nothing unset, zero or negative."""
    values = {key: getattr(args, key, None) for name in names for key in _ON_COMMAND_LINE[name]}
    return {key: value for key, value in values.items() if value and (isinstance(value, str) or value > 0)}


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write every schedule's settings in ``args`` over ``params``, but nothing unset, zero or negative."""
    params.update(_given(args, *VALID_LR_SCHEDULES))


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return ``({"type": ..., "params": {...}}, None)`` of the schedule named in ``args``, or ``(None, reason)``."""
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a supported LR schedule{nearest_hint(name, VALID_LR_SCHEDULES)}"
    return {"type": name, "params": _given(args, name)}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return ``(rate, "")``: a schedule's first rate (LRRangeTest) or highest one; ``(None, reason)`` without one."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name, params = config["type"], config["params"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule"
    if name == "WarmupCosineLR":
        return None, f"{name} takes its rate from the optimizer"
    key = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}.get(name, "warmup_max_lr")
    return (params[key], "") if params.get(key) is not None else (None, f"{key} not defined in the params of {name}")
