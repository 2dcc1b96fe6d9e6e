"""How many choices each expert gets, counted on the device; and a bias on the router's scores that evens them out.

The bias takes the place of an auxiliary loss (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for
Mixture-of-Experts"; DeepSeek-V3): after each update it grows by a small step for experts with less than the mean load,
and shrinks by as much for those with more.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.accelerator.device import get_accelerator
from deepspeed.comm.collectives import AxisGroup, sum_in_place
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.zero.hooks import inside_backward

BIASES = ("e_score_correction_bias", "expert_bias")
"""What the buffer is called that routers of Transformers add to their scores before they choose."""
_MOST_EVENTS = 512  # loads of single experts go to monitors up to so many experts of all layers


class LayerLoad(NamedTuple):
    """Choices of all ranks in one layer and window: of each expert, of the experts of each rank, and those dropped."""

    experts: list[int]
    ranks: list[int]
    dropped: int

    @property
    def skew(self) -> float:
        """Return the load of the busiest expert over the mean; 0 without tokens."""
        return _skew(self.experts)

    @property
    def rank_skew(self) -> float:
        """Return the load of the busiest rank over the mean; 0 without tokens."""
        return _skew(self.ranks)


def _skew(loads: list[int]) -> float:
    return max(loads) * len(loads) / max(1, sum(loads))


@dataclass
class _Layer:
    """``counts`` [experts + 1], of this rank and window, the last of dropped choices. ``owner`` has the bias."""

    path: str
    experts: int
    homes: int
    counts: torch.Tensor
    owner: nn.Module | None = None
    bias: str = ""


class ExpertLoads:
    """Loads of the layers of one engine. ``coefficient``: step of their biases after each update; None: no bias."""

    def __init__(self, coefficient: float | None = None) -> None:
        self.coefficient = coefficient
        self._layers: list[_Layer] = []
        self._outcomes: Any = None
        self._ranks: AxisGroup  # that have different tokens
        self._summed: Any = None  # the result of the update whose window has been summed
        self._last: torch.Tensor | None = None  # [layers, most experts + 1], of all ranks in the last window

    def watch(self, model: nn.Module, path: str, module: nn.Module, homes: int, back: ExitStack) -> None:
        """Count what ``module`` is given to compute, whose experts ``homes`` ranks divide, until ``back`` is closed.

        Stacked experts are watched before they are divided. DeepSpeedConfigError where their router has no bias.
        """
        experts = int(module.num_local_experts * homes if isinstance(module, MOELayer) else module.num_experts)  # type: ignore
        layer = _Layer(path, experts, homes, torch.zeros(experts + 1, dtype=torch.int64))
        if isinstance(module, MOELayer):
            module.note = partial(self._note, layer, module)
            back.callback(setattr, module, "note", None)
        else:
            if self.coefficient is not None:
                layer.owner, layer.bias = _bias_of(model, path, module, experts)
            count = partial(self._before_experts, layer)
            back.callback(module.register_forward_pre_hook(count).remove)
        self._layers.append(layer)

    def follow(self, engine: Any) -> None:
        """Take the windows of ``engine`` from now on, if there are layers to watch."""
        if not self._layers:
            return
        device = get_accelerator().torch_device()
        for layer in self._layers:
            layer.counts = layer.counts.to(device)
            if layer.owner is not None:  # steps of 1e-3 vanish in bf16
                layer.owner._buffers[layer.bias] = layer.owner.get_buffer(layer.bias).float()
        self._outcomes, self._ranks = engine._outcomes, engine.mesh.zero
        engine._expert_loads = self
        engine.update_metrics.more = self.figures
        if self.coefficient is not None:
            engine._after_update.append(self._balance)

    def _before_experts(self, layer: _Layer, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._note(layer, module, inputs[1])

    def _note(self, layer: _Layer, module: nn.Module, index: torch.Tensor, wanted: torch.Tensor | None = None) -> None:
        """Count the chosen experts ``index`` [tokens, k]; ``wanted``: choices before any was dropped."""
        if not module.training or inside_backward():  # a recomputation chooses the same again
            return
        index, experts = index.detach().reshape(-1), layer.experts
        places = torch.where((index >= 0) & (index < experts), index, experts)
        layer.counts.scatter_add_(0, places, torch.ones_like(places))
        if wanted is not None:  # a token that goes nowhere is not dropped
            layer.counts[-1] += wanted.sum() - len(index)

    def _end_window(self) -> None:
        """Sum the counts of the window over all ranks, once after each update. Collective."""
        if self._outcomes.last is self._summed:
            return
        self._summed = self._outcomes.last
        table = nn.utils.rnn.pad_sequence([layer.counts for layer in self._layers], batch_first=True)
        self._last = sum_in_place(table, self._ranks)
        for layer in self._layers:
            layer.counts.zero_()

    def _balance(self) -> None:
        """Move the biases after an update, by the same on all ranks; not after one that was left out."""
        self._end_window()
        result = self._outcomes.last
        if result.left_out or self._last is None or self.coefficient is None:
            return
        factor: Any = self.coefficient
        if result.skip is not None:  # the device decides, and the program does not wait for it
            factor = self.coefficient * (1 - result.skip)
        for layer, row in zip(self._layers, self._last, strict=True):
            if layer.owner is not None:
                loads, bias = row[: layer.experts].double(), layer.owner.get_buffer(layer.bias)
                bias += (torch.sign(loads.mean() - loads) * factor).to(bias.dtype).view_as(bias)

    def read(self) -> dict[str, LayerLoad]:
        """Return the loads of each layer, by its path, in the last window; {} before the first. Waits for the device.

        A path is that of the experts of a model of Transformers, or of a ``deepspeed.moe.layer.MoE``.
        """
        rows = [] if self._last is None else self._last.tolist()
        loads = {}
        for layer, row in zip(self._layers, rows, strict=False):
            each, share = row[: layer.experts], layer.experts // layer.homes
            ranks = [sum(each[first : first + share]) for first in range(0, layer.experts, share)]
            loads[layer.path] = LayerLoad(each, ranks, row[layer.experts])
        return loads

    def figures(self) -> dict[str, float]:
        """Return what monitors are told of the window that has ended. Collective; waits for the device."""
        self._end_window()
        loads = self.read()
        values: dict[str, float] = {
            "expert_skew": max(load.skew for load in loads.values()),
            "expert_rank_skew": max(load.rank_skew for load in loads.values()),
            "expert_idle": sum(load.experts.count(0) for load in loads.values()),
            "expert_dropped": sum(load.dropped for load in loads.values()),
        }
        alone = sum(len(load.experts) for load in loads.values()) <= _MOST_EVENTS
        for path, load in loads.items():
            values[f"expert_skew/{path}"] = load.skew
            values |= {f"expert_load/{path}/rank_{i}": number for i, number in enumerate(load.ranks)}
            values |= {f"expert_load/{path}/{i}": number for i, number in enumerate(load.experts) if alone}
        return values


def _bias_of(model: nn.Module, path: str, module: nn.Module, experts: int) -> tuple[nn.Module, str]:
    """Return the module with the bias on the scores by which the experts at ``path`` are chosen, and its name."""
    block = model.get_submodule(path.rpartition(".")[0])
    others = [m for m in block.modules() if m not in set(module.modules())]
    for other in others:
        for name, buffer in other.named_buffers(recurse=False):
            if name in BIASES and buffer.numel() == experts:
                return other, name
    fixed = any(name in BIASES for other in others for name, _ in other.named_parameters(recurse=False))
    raise DeepSpeedConfigError(
        f"expert_parallel.load_balance_coeff: the router of {path} ({type(block).__name__}) "
        + ("keeps its bias as a parameter" if fixed else f"has no bias of {experts} scores")
        + ". Those of DeepSeek-V3, GLM-4 MoE, Kimi Linear, MiniMax-M2, LFM2-MoE, Nemotron-H and others have a buffer "
        f"{' or '.join(BIASES)}; for this one delete the key, and set the auxiliary loss in the model's configuration"
    )
