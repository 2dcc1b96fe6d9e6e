"""Sequence parallelism for models of Transformers as they are: hooks on the outermost models, attention by its name.

A forward in training gets its part of the batch, with the targets of its tokens, and its loss becomes that of all
tokens of the sequence: the ranks' losses are weighed by their tokens and summed, while the gradient of each goes its
own way. Gradients are averaged over these ranks, so that what a client adds to the loss counts once; that of the
model's loss is multiplied by their number first.
"""

import inspect
import logging
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.device import get_accelerator
from deepspeed.client.comm.groups import GETTERS
from deepspeed.client.mpu import Ways
from deepspeed.comm.collectives import AxisGroup, failures
from deepspeed.comm.mesh.groups import Mesh, with_group
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import DeepSpeedConfigError, SequenceError
from deepspeed.monitor.log import log_dist
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.plain import PlainPipeline
from deepspeed.sequence.attention import PREFIX, registered, running
from deepspeed.sequence.balance import balance_whole_sequences
from deepspeed.sequence.batch import IGNORED, cut, is_part, shape_fault, taken, weighed, whole_batch
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.sequence.layout import Layout, RingGroups, agreed, codes_of, joined, layout_of
from deepspeed.sequence.ring import inner_ranks
from deepspeed.tensor.differentiable import paired, sum_parts
from deepspeed.tensor.loss import loss_fault
from deepspeed.zero.regions import bounds, widths

_KEY = "sequence_parallel_size"
_KINDS = {"full_attention", "sliding_attention"}
# Layers that carry a state along the sequence, by their class.
_STATEFUL = re.compile(r"Mamba|RWKV|Rwkv|xLSTM|Recurrent|DeltaNet|ShortConv|LinearAttention|RetNet|Hyena")
_PRIME = 65_521


def wire_sequences(model: nn.Module, cfg: DeepSpeedConfig, mesh: Mesh, dims: Ways, back: ExitStack) -> Mesh:
    """Let ``model`` work on parts of sequences, where the configuration or a registered client asks for it.

    Return ``mesh``, which knows who cuts, with more groups to destroy where keys go around a ring. ``back`` undoes the
    rest. A model that is none of Transformers is left to its own attention, but under the pass ``autosp``. Raises
    DeepSpeedConfigError, a ValueError, for one whose attention cannot be divided.
    """
    client, asked = dims.registered, "autosp" in (cfg.compile.passes or ())
    if mesh.sp.size == 1 or (client is None and not asked and (cfg.sequence_ways == 1 or dims.known)):
        return mesh
    tops, fault = outermost(model.source if isinstance(model, PlainPipeline) else model), None
    try:
        ways = _check_all(model, tops, mesh, cfg.sequence.attention, shifts=client is None)
    except DeepSpeedConfigError as error:
        fault = error
    for rank, text in failures(fault, mesh.pp).items():  # the others wait, and may have other layers
        raise fault or DeepSpeedConfigError(f"{mesh.title(rank)}: {text}")
    if not tops:
        text = f"{type(model).__name__} is no model of Transformers: its attention has to be divided by itself"
        if asked or cfg.sequence.attention != "auto":
            which = 'compile.passes has "autosp"' if asked else f'sequence.attention is "{cfg.sequence.attention}"'
            raise DeepSpeedConfigError(f"{which}, but {text}")
        divides = isinstance(model, PipelineModule) or any(isinstance(m, DistributedAttention) for m in model.modules())
        text += " (deepspeed.sequence.layer.DistributedAttention); gradients are summed over a sequence's ranks"
        log_dist(f"{_KEY} {mesh.sp.size}: {text}", level=logging.INFO if divides else logging.WARNING)
        # The group that its layers get: made before any rank may fail, whose wait there ends as in the engine's own.
        mesh = replace(mesh, sp=replace(mesh.sp, pg=GETTERS["get_sequence_parallel_group"]()))
        if isinstance(model, PipelineModule):
            model.sharers = mesh.sp
        return mesh
    mesh, ring = _with_ring(mesh, ways)
    for top in tops:
        attach_attention(top, back)
        balance_whole_sequences(top)
        in_eval = not getattr(client, "disable_in_eval", True)
        Hooks(mesh.sp, ring, cuts=client is None, in_eval=in_eval).attach(top, back)
    around = "" if ring is None else f", heads over {ways} and keys around {mesh.sp.size // ways}"
    log_dist(f"sequence parallelism over {mesh.sp.size} ranks: attention {tops[0].config._attn_implementation}{around}")
    return replace(mesh, cuts=client is None)


def _check_all(model: nn.Module, tops: list[Any], mesh: Mesh, attention: str, *, shifts: bool) -> int:
    """Return the least that ``check`` returns of ``tops``; raise DeepSpeedConfigError, too, for some pipelines."""
    if tops and isinstance(model, PipelineModule) and (type(model) is not PlainPipeline or model.loss_fn is not None):
        raise DeepSpeedConfigError(
            f"{_KEY}: the loss of whole sequences is that of {type(tops[0]).__name__} itself, which a PipelineModule "
            "does not call with labels. Cut the model by deepspeed.pipe.cut_model without loss_fn, or set the key to 1"
        )
    options: dict[str, Any] = {"tp": mesh.tp.size, "attention": attention, "shifts": shifts}
    return min((check(top, mesh.sp.size, **options) for top in tops), default=0)


def _with_ring(mesh: Mesh, ways: int) -> tuple[Mesh, RingGroups | None]:
    """Return ``mesh`` with the groups of a ring of neighbourhoods of ``ways`` ranks, and these; None for one alone."""
    ranks, place = mesh.sp.ranks, mesh.sp.index
    if ways == len(ranks):
        return mesh, None
    mesh, inner = with_group(mesh, "sequence/heads", ranks[place - place % ways :][:ways])
    mesh, outer = with_group(mesh, "sequence/ring", ranks[place % ways :: ways])
    return mesh, RingGroups(inner, outer)


def outermost(model: nn.Module) -> list[Any]:
    """Return the models of Transformers in ``model`` that are inside no other one."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    models = [(path, m) for path, m in model.named_modules() if isinstance(m, transformers.PreTrainedModel)]
    paths = [path for path, _ in models]
    inner = [p for p in paths if any(p != o and p.startswith(f"{o}." if o else "") for o in paths)]
    return [module for path, module in models if path not in inner]


def check(model: Any, ranks: int, *, tp: int = 1, attention: str = "ulysses", shifts: bool = True) -> int:
    """Return how many of the ``ranks`` of a sequence divide heads (``inner_ranks``). Raise DeepSpeedConfigError, which
    names the reason, where they cannot divide the sequences of ``model``. ``shifts``: labels will be shifted.
    """
    config = model.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS)
    kinds += sorted({type(m).__name__ for m in model.modules() if _STATEFUL.search(type(m).__name__)})
    who = f"{_KEY} is {ranks}, but {type(model).__name__}"
    if kinds:
        raise DeepSpeedConfigError(
            f"{who} has layers of the kind {', '.join(kinds)}: they carry a state along the sequence, or have a "
            f"mask of their own, which each part would begin anew. Set {_KEY} to 1"
        )
    if shifts and (fault := loss_fault(model)):
        raise DeepSpeedConfigError(f"{_KEY} is {ranks}, but {fault}. Set {_KEY} to 1")
    takes = inspect.signature(model.forward).parameters
    if not model._can_set_attn_implementation() or "position_ids" not in takes or "kwargs" not in takes:
        raise DeepSpeedConfigError(
            f"{who} does not take position ids and keywords of the loss, or does not compute attention through the "
            f"registry of Transformers. Set {_KEY} to 1"
        )
    heads = getattr(config, "num_attention_heads", None)
    ways = inner_ranks(ranks, heads // tp if isinstance(heads, int) else ranks, attention)
    if isinstance(heads, int) and heads // tp < ways:
        raise DeepSpeedConfigError(
            f"{who} has {heads} attention heads{f' on {tp} tensor-parallel ranks' if tp > 1 else ''}, and each rank "
            f"needs one. Set {_KEY} to {heads // tp} or less, or sequence.attention to auto"
        )
    return ways


def attach_attention(model: Any, back: ExitStack) -> None:
    """Let ``model`` call attention over sequence-parallel ranks, which works by the implementation that it has now."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        core = getattr(config, "_attn_implementation", None)
        if core is None or core.startswith(PREFIX):
            continue
        try:
            name = registered(core, sys.modules["transformers"])
        except SequenceError as error:
            raise DeepSpeedConfigError(f"{_KEY}: {type(model).__name__}: {error}") from None
        back.callback(setattr, config, "_attn_implementation_internal", core)
        config._attn_implementation_internal = name


@dataclass
class _Run:
    """One forward under way, from the hook before it to the one after. ``counts`` [ranks]: targets of each rank."""

    module: nn.Module
    entered: ExitStack
    counts: torch.Tensor | None = None
    summed: bool = False


class Hooks:
    """Hooks of one model. ``cuts``: whole batches are cut, and losses weighed; else the client does both."""

    def __init__(self, group: AxisGroup, ring: RingGroups | None, *, cuts: bool, in_eval: bool) -> None:
        self._group, self._ring, self._cuts, self._in_eval = group, ring, cuts, in_eval
        self._device, self._runs = get_accelerator().torch_device(), list[_Run]()

    def attach(self, model: nn.Module, back: ExitStack) -> None:
        """Attach the hooks to ``model`` and the models inside it, of which a client may call each."""
        models = [m for m in model.modules() if isinstance(m, sys.modules["transformers"].PreTrainedModel)]
        for module in models:
            if "position_ids" in inspect.signature(module.forward).parameters:
                back.callback(module.register_forward_pre_hook(self._before, with_kwargs=True).remove)
                back.callback(module.register_forward_hook(self._after, always_call=True).remove)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._runs:  # inside another of the models
            return None
        names = inspect.signature(module.forward).parameters
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        parts = not self._cuts or is_part(given)
        run, layout = _Run(module, ExitStack()), None
        if parts and (module.training or self._in_eval or self._cuts):
            given, layout = self._of_parts(given, run)
        elif not parts and module.training:
            given, layout = self._cut(given, run)
        self._runs.append(run)
        run.entered.enter_context(running(layout, 1 / self._group.size if run.summed else 1.0))
        return (), given

    def _cut(self, given: dict[str, Any], run: _Run) -> tuple[dict[str, Any], Layout]:
        """Cut a whole batch, the same on all ranks."""
        name = "inputs_embeds" if given.get("input_ids") is None else "input_ids"
        fault = shape_fault(given, (name, "labels"))
        group, ids = self._group, given.get(name)
        error = SequenceError(f"sequence parallelism: {fault}") if fault else None
        numbers: list[int | torch.Tensor] = [0, 0, 0]
        if not fault:
            assert ids is not None
            checked = [ids, *(given.get(key) for key in ("labels", "position_ids", "attention_mask"))]
            numbers = [ids.shape[0], ids.shape[1], sum(_checksum(value) for value in checked if value is not None)]
        _, answers = agreed(numbers, error, group, self._device)
        if any(answer != answers[0] for answer in answers):
            raise SequenceError(
                f"the ranks of one sequence got different batches ({_shapes(answers, group)}). Take them from "
                "engine.deepspeed_io, wrap the loader in UlyssesSPDataLoaderAdapter, or sample by data-parallel ranks"
            )
        assert ids is not None
        batch = whole_batch({key: value for key, value in given.items() if value is not None}, ids, group.size)
        ids = batch[name]
        codes = codes_of(batch["position_ids"], batch.get("attention_mask"), ids.shape[0])
        layout = layout_of(codes, group, widths(bounds(ids.shape[1], group.size)), self._ring, from_ends=True)
        parts = [taken(batch["shift_labels"], layout.tokens_of(rank)) for rank in range(group.size)]
        run.counts = torch.stack([targets.ne(IGNORED).sum() for targets in parts])
        part = cut(batch, ids, layout.tokens_of(group.index))
        part["labels"] = part["shift_labels"]
        run.summed = given.get("num_items_in_batch") is not None
        return part, layout

    def _of_parts(self, given: dict[str, Any], run: _Run) -> tuple[dict[str, Any], Layout]:
        """Take a batch that was cut before: this rank has its part, with the positions of its tokens."""
        name = "inputs_embeds" if given.get("input_ids") is None else "input_ids"
        fault = shape_fault(given, (name, "position_ids"))
        error = SequenceError(f"a part of a sequence needs its position ids: {fault}") if fault else None
        ids, targets = given.get(name), given.get("shift_labels")
        numbers: list[int | torch.Tensor] = [0, 0, 0]
        if not fault:
            assert ids is not None
            numbers = [ids.shape[0], ids.shape[1], 0 if targets is None else targets.ne(IGNORED).sum()]
        answers, read = agreed(numbers, error, self._group, self._device)
        rows, lengths = [row for row, *_ in read], [length for _, length, _ in read]
        if len(set(rows)) > 1 or min(lengths) == 0:
            shapes = _shapes(read, self._group)
            raise SequenceError(f"the parts of one sequence have different numbers of rows, or no token ({shapes})")
        assert ids is not None
        codes = codes_of(given["position_ids"], given.get("attention_mask"), ids.shape[0])
        run.counts = None if targets is None else answers[:, 2]
        if self._cuts:
            run.summed, given = given.get("num_items_in_batch") is not None, {**given, "labels": targets}
        whole = joined(codes.to(answers.device), self._group, lengths)
        return given, layout_of(whole, self._group, lengths, self._ring)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._runs or self._runs[-1].module is not module:
            return None
        run = self._runs.pop()
        run.entered.close()
        if output is None or run.counts is None:
            return None
        loss = output[0] if isinstance(output, tuple) else output.get("loss")
        if loss is None:
            return None
        whole = self._weighed(loss, run)
        if isinstance(output, tuple):
            return (whole, *output[1:])
        output["loss"] = whole
        return output

    def _weighed(self, loss: torch.Tensor, run: _Run) -> torch.Tensor:
        """Return the loss of the sequence from that of this rank's tokens, or this one where it is not the engine that
        cuts. Collective.
        """
        assert run.counts is not None
        count = run.counts[self._group.index]
        if not self._cuts:  # the mean over no target is no number
            return torch.where(count > 0, loss, 0.0)
        whole = sum_parts(loss, self._group) if run.summed else weighed(loss, count, run.counts.sum(), self._group)
        return paired(lambda v: v.view_as(v), lambda grad: grad * self._group.size, whole)


def _shapes(answers: list[list[int]], group: AxisGroup) -> str:
    shapes = zip(group.ranks, answers, strict=True)
    return "[rows, tokens] of " + ", ".join(f"rank {rank}: {shape[:2]}" for rank, shape in shapes)


def _checksum(value: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on the values of ``value`` and their order."""
    flat = value.detach().reshape(-1)
    flat = flat.float().view(torch.int32) if flat.is_floating_point() else flat
    return (flat.to(torch.int64) * (torch.arange(len(flat), device=flat.device) % _PRIME + 1)).sum()
