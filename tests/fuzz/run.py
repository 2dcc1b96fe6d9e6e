"""One case on the ranks of this process group: the engine beside the plain trainer."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.errors import RankFailedError
from deepspeed.pipe import PipelineModule
from deepspeed.tools.verify.grads import full_parameters, scaled_error
from deepspeed.tools.verify.models import MicroBatch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
)
from tests.dist.test_offload_zenflow import against_statement
from tests.fuzz import models
from tests.fuzz.draw import Case, Event, Micro, Window, at_stage
from tests.fuzz.plain import DTYPES, Plain, config_of, grouped, optimizer_of, step_schedule, tokens_of
from tests.harness import pipes
from tests.harness.faults import raise_planted
from tests.harness.lockstep import not_at_rest

# In fp32 only the order of additions differs, as in the parity matrix. In 16 bits forwards and backwards are the same,
# bit for bit, while the weights are; a gradient is summed and sent in fp32. After each look both sides go on from the
# same states, so that errors do not add up, and no master that lies on the border of two 16-bit weights goes two ways.
# Between two looks it may: then a 16-bit weight differs in its last place, and everything by so much.
TOLERANCE, ROUNDED = 2e-6, 3e-2
ZENFLOW = 2e-5  # after 13 steps, as in its own tests


class Run:
    """Both sides of a case, and what happens to them."""

    def __init__(self, case: Case, folder: str) -> None:
        self.case, self.folder, self.gas = case, folder, len(case.windows[0].micros)
        self.engine = self.start(self.built())
        self.rank, self.world = self.engine.mesh.data.index, self.engine.mesh.data.size
        self.plain = Plain(case, self.world)
        self.found: list[str] = []
        self.doing = ""
        self.without_state: set[str] = set()  # names of what was frozen when the optimizer was made
        self.checkpoints: list[tuple[str, Any, bool]] = []
        self.step = self.micro = self.unlooked = 0
        self.ahead = False  # masters are, or weights, until the next update

    @property
    def apart(self) -> bool:
        """Whether masters are other memory than weights, which they follow at the next update."""
        return self.case.dtype != "fp32" or self.case.zero.get("offload_optimizer", {}).get("device") == "nvme"

    def built(self) -> nn.Module:
        """A model for an engine."""
        if self.case.front == "pipe":
            return PipelineModule(models.pipe_layers(self.case), num_stages=2, loss_fn=pipes.cross_entropy)
        config = config_of(self.case, self.gas, self.folder)
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=self.case.born):
            model = models.build(self.case).train()
        return model if self.case.born else models.round_to(model, DTYPES[self.case.dtype])

    def start(self, model: nn.Module) -> Any:
        """An engine for it."""
        given: dict[str, Any] = {}
        params = dict(model.named_parameters())
        groups = [{**g, "params": [params[n] for n in g["params"]]} for g in grouped(self.case, params)]
        if self.case.optimizer.startswith("client "):
            given["optimizer"] = optimizer_of(self.case, groups)
        elif self.case.groups != "one":
            given["model_parameters"] = groups
        if self.case.schedule == "client":
            given["lr_scheduler"] = step_schedule
        return deepspeed.initialize(model=model, config=config_of(self.case, self.gas, self.folder), **given)[0]

    # -- one update -----------------------------------------------------------------------------------------------
    def window(self, window: Window) -> None:
        """The micro-batches of one update, the update, and what comes behind it."""
        if len(window.micros) != self.gas:
            self.gas = len(window.micros)
            size = self.engine.train_micro_batch_size_per_gpu() * self.gas * self.world
            self.engine.set_train_batch_size(size)
        if self.case.front == "pipe":
            self.pipeline_batch()
        else:
            self.micros(window)
        self.unlooked += 1
        if self.unlooked >= self.case.look:
            self.look()
        if found := not_at_rest(self.engine):
            self.differs(f"not at rest after the update: {found}")
        for event in window.between:
            self.happen(event)
        self.step += 1

    def pipeline_batch(self) -> None:
        data = iter([pipes.micro_batch(self.step, micro, self.rank) for micro in range(self.gas)])
        loss = float(self.engine.train_batch(data))
        told = [self.plain.micro(self.step, m, gas=self.gas, how="engine", scale=1.0) for m in range(self.gas)]
        every = [one for ranks in told for (one,) in ranks]
        self.same(torch.tensor(loss), torch.tensor(sum(every) / len(every)), "loss of the batch")
        self.after_update(1.0)

    def micros(self, window: Window) -> None:
        number, done = 0, set[int]()
        while number < len(window.micros):
            micro, self.micro, self.last = window.micros[number], number, number == len(window.micros) - 1
            answers = [self.happen(event) for event in micro.before if number not in done]
            done.add(number)
            if "anew" in answers:
                number = 0
                continue
            scale = float(self.engine.loss_scale())
            self.one(number, micro.how, scale)
            self.written = False
            for event in micro.after:
                self.happen(event)
            self.engine.step()
            number += 1
        self.after_update(scale)

    def after_update(self, scale: float) -> None:
        norm = self.plain.update(scale)
        ours = self.engine.get_global_grad_norm()
        ours = math.nan if ours is None else float(ours)
        if math.isinf(norm) != math.isinf(ours):
            self.differs(f"norm is {ours}, plain {norm}")
        if not math.isinf(norm):
            self.same(torch.tensor(ours), torch.tensor(norm), "norm")
            self.ahead = False

    def one(self, number: int, how: str, scale: float) -> None:
        """Forward and backward of both."""
        expected = self.plain.micro(self.step, number, gas=self.gas, how=how, scale=scale)[self.rank]
        engine, place = self.engine, MicroBatch(self.step, number, self.rank, self.world)
        with engine.no_sync() if how == "no_sync" else contextlib.nullcontext():
            losses = self.forward(place, how=how)
            for loss, value in zip(losses, expected, strict=True):
                self.same(loss, torch.tensor(value), f"loss of micro-batch {number}")
            given = [loss * float("inf") if how == "overflow" else loss for loss in losses]
            given = [loss for loss in given for _ in range(2 if how == "twice" else 1)]
            for count, loss in enumerate(given, start=1):
                if self.case.tokens:
                    engine.set_batch_tokens(tokens_of(place))
                keep = count < len(given)
                _ = loss.backward(retain_graph=keep) if how == "plain" else engine.backward(loss, retain_graph=keep)

    def forward(self, place: MicroBatch, *, how: str = "engine", model: Any = None) -> list[Tensor]:
        """The engine's losses."""
        called = self.engine if model is None else model
        if how == "module":
            called = self.engine.module
        elif how == "parts":
            called = lambda *inputs: models.Mixed.forward(self.engine.module, *inputs)  # noqa: E731
        return models.losses_of(self.case, called, place, self.plain.dtype)

    # -- comparisons ----------------------------------------------------------------------------------------------
    def same(self, ours: Tensor | None, theirs: Tensor, what: str, *, mask: Tensor | None = None) -> None:
        """Note where they are not the same. Nothing is raised, as the other ranks may find them so."""
        if ours is None:
            self.differs(f"{what} is None")
            return
        ours, theirs = ours.detach().float(), theirs.detach().float()
        if mask is not None and ours.shape == theirs.shape:
            ours = torch.where(mask, theirs, ours)
        error = scaled_error(ours, theirs)
        loose = self.case.dtype != "fp32" and (self.unlooked or self.case.look > 1)
        limit = ROUNDED if loose else TOLERANCE * (1 + self.unlooked)
        if not error <= limit:
            self.differs(f"{what}: error {error:.2e}, limit {limit:.0e}")

    def differs(self, what: str) -> None:
        """Note it."""
        self.found.append(f"rank {dist.get_rank()}, update {self.step}, {self.doing}{what}")

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The engine's, of this stage."""
        return dict(self.engine.module.named_parameters())

    def look(self) -> None:
        """Compare all states, and let both sides go on from the engine's."""
        self.unlooked = max(0, self.unlooked - 1) if self.case.look > 1 else 0
        if "clamped" in self.case.layers:  # masters of what is whole follow a forward at the next update
            self.engine.optimizer.refresh_fp32_params()
        plain, found = self.plain, full_parameters(self.engine.module)
        for name, value in found.items():
            mask, shown = plain.ambiguous.get(name), plain.params[name].detach()
            if name in plain.masters:
                master = safe_get_full_fp32_param(self.params[name])
                self.same(master, plain.masters[name], f"master of {name}", mask=mask)
                if self.case.dtype != "fp32" and not self.ahead and not torch.equal(value, master.to(value.dtype)):
                    self.differs(f"weight {name} is not its rounded master")
            if self.case.dtype == "fp32" or name not in plain.masters:
                self.same(value, shown, f"weight {name}", mask=mask)
        for name in found.keys() & plain.masters.keys():
            for key, slot in plain.slots(name).items() if plain.masters[name].numel() else ():
                ours = safe_get_full_optimizer_state(self.params[name], key)
                if ours is None and not slot.any():  # an optimizer that makes them when it needs them
                    continue
                self.same(ours, slot, f"{key} of {name}", mask=plain.ambiguous.get(name))
                if ours is not None:
                    slot.copy_(ours.view_as(slot))
        if self.case.late != "delayed" and self.case.front != "pipe":
            with torch.no_grad():
                for name, value in found.items():
                    plain.params[name].copy_(value)
                    if name in plain.masters:
                        plain.masters[name].copy_(safe_get_full_fp32_param(self.params[name]))
        self.unlooked = 0

    # -- events ---------------------------------------------------------------------------------------------------
    def happen(self, event: Event) -> str | None:
        """Let it happen to both sides."""
        self.doing = f"at {event.name}({event.pick}): "
        answer = getattr(self, f"on_{event.name}")(event.pick)
        self.doing = ""
        return answer

    def chosen(self, pick: int, *, trained: bool = True, count: int = 1) -> list[str]:
        """Names of parameters of this stage."""
        names = [n for n in self.params if "tied" not in n and (n in self.plain.masters or not trained)]
        return [names[(pick + i * 7) % len(names)] for i in range(min(count, len(names)))] if names else []

    def everywhere(self, names: list[str]) -> list[str]:
        """With those that other stages have chosen."""
        if self.case.front != "pipe":
            return names
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, names)
        return sorted({name for some in every for name in some})

    def on_edit(self, pick: int) -> None:
        names = list(dict.fromkeys(self.chosen(pick, trained=False, count=1 + pick % 3)))
        params = [self.params[n] for n in names]
        cut = self.case.stage == 3 or self.case.front == "llama"
        modifier = None if not cut else 0 if self.case.front != "pipe" else self.engine.mesh.zero.ranks[0]
        with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier), torch.no_grad():
            for param in params:
                alone = modifier is not None and dist.get_rank() != modifier
                param.mul_(7.0 if alone else -0.5)
        for name in self.everywhere(names):
            self.plain.write(name, lambda value: value * -0.5)
        self.ahead |= self.apart

    def on_read(self, pick: int) -> None:
        names = self.chosen(pick, trained=False, count=3)
        with deepspeed.zero.GatheredParameters([self.params[n] for n in names]):
            for name in names:
                self.same(self.params[name], self.plain.params[name], f"weight {name}")

    def on_masters(self, pick: int) -> None:
        known = not self.ahead and "clamped" not in self.case.layers
        for name in self.chosen(pick, count=2) if known else ():
            self.same(safe_get_full_fp32_param(self.params[name]), self.plain.masters[name], f"master of {name}")

    def on_set_master(self, pick: int) -> None:
        for name in self.chosen(pick):
            value = self.plain.masters[name] * 0.75 + 0.01
            safe_set_full_fp32_param(self.params[name], value.clone())
        for name in self.everywhere(self.chosen(pick)):
            self.plain.masters[name].mul_(0.75).add_(0.01)
            with torch.no_grad():
                self.plain.params[name].copy_(self.plain.masters[name])

    def on_set_slot(self, pick: int) -> None:
        for name in self.everywhere(self.chosen(pick)):
            for key, slot in sorted(self.plain.slots(name).items())[:1]:
                if slot.numel() and name in self.params:
                    safe_set_full_optimizer_state(self.params[name], slot * 0.5, key)
                slot.mul_(0.5)

    def on_set_local(self, pick: int) -> None:
        """Not where several ranks have the weights whole in fp32: each sees its own part at once, and the others' parts
        from the next update on.
        """
        names = self.chosen(pick)
        names = names if names and self.sets_local(names[0]) else []
        for name in names:
            safe_set_local_fp32_param(self.params[name], safe_get_local_fp32_param(self.params[name]) * 0.5)
        for name in self.everywhere(names):  # stages choose each for itself
            self.plain.masters[name].mul_(0.5)
            if self.low(name):
                self.ahead = True
            else:
                self.plain.show({name: self.plain.masters[name]})

    def low(self, name: str) -> bool:
        """Whether a parameter is kept in less than fp32; a batch norm's parameters are not."""
        return self.plain.params[name].dtype is not torch.float32

    def sets_local(self, name: str) -> bool:
        if self.ahead or name.endswith("clamped.weight"):  # whose forward writes over it, too
            return False
        if not self.low(name) and "zero_hpz_partition_size" in self.case.zero:  # weights of other nodes follow later
            return False
        return self.low(name) or self.case.stage == 0 or self.world == 1 or self.params[name]._ds_unit.movable

    def on_freeze(self, pick: int) -> None:
        names = [n for n in self.chosen(pick) if not n.startswith(("heads.", "lm_head.", "model.embed"))]
        for name in names:
            for side in (self.params, self.plain.params):
                side[name].requires_grad_(not side[name].requires_grad)

    def on_eval(self, pick: int) -> None:
        self.engine.eval()
        if self.case.late == "delayed":
            self.plain.show()
        self.plain.model.eval()
        self.on_no_grad(pick)
        self.engine.train()
        self.plain.model.train()

    def on_no_grad(self, pick: int, model: Any = None) -> None:
        place = MicroBatch(100 + pick % 50, 0, self.rank, self.world)
        with torch.no_grad():
            for ours, theirs in zip(self.forward(place, model=model), self.plain.losses(place), strict=True):
                self.same(ours, theirs, "evaluation")

    def on_generate(self, pick: int) -> None:
        for again in range(3):
            self.on_eval(pick + again)

    def on_unsharded(self, pick: int) -> None:
        with self.engine.unsharded() as module:
            for again in range(1 + (self.rank + pick) % 3 if self.case.front != "llama" else 2):
                self.on_no_grad(pick + again, module)

    def on_stream(self, pick: int) -> None:
        seen = set()
        for bucket in self.engine.stream_weights(2000):
            for name, value in bucket:
                seen.add(name)
                if name in self.plain.params:
                    self.same(value, self.plain.params[name], f"streamed {name}")
        if missing := self.plain.params.keys() - seen:
            self.differs(f"not in the stream: {sorted(missing)}")

    def on_lr(self, pick: int) -> None:
        for optimizer in (self.engine.optimizer, self.plain.optimizer):
            group = optimizer.param_groups[pick % len(optimizer.param_groups)]
            group["lr"] *= 0.7

    def on_state(self, pick: int) -> None:
        for slots in list(self.engine.optimizer.state.values()):
            for value in slots.values():
                if isinstance(value, Tensor) and not (bool(value.isfinite().all()) or self.on_drive):
                    self.differs("a slot of the optimizer is not finite")

    @property
    def on_drive(self) -> bool:
        """Slots there are read through the safe_get family; what stands for them here is NaN."""
        return bool(self.case.zero.get("offload_optimizer", {}).get("device") == "nvme")

    def on_state_dict(self, pick: int) -> None:
        self.engine.optimizer.state_dict()
        state = self.engine.module_state_dict()
        for name, theirs in self.plain.model.state_dict().items():
            if name not in state or tuple(state[name].shape) != tuple(theirs.shape):
                if self.case.front != "llama":
                    self.differs(f"state_dict: {name}")
            elif self.case.stage < 3 and self.case.front != "llama":
                self.same(state[name], theirs, f"state_dict: {name}")

    def on_load_module(self, pick: int) -> None:
        state = self.plain.model.state_dict(keep_vars=True)
        values = {name: (v.detach() * -0.5 if isinstance(v, nn.Parameter) else v.clone()) for name, v in state.items()}
        self.engine.load_module_state_dict(values)
        for name in self.plain.params:
            self.plain.write(name, lambda value: value * -0.5)
        self.ahead |= self.apart

    def on_offload(self, pick: int) -> None:
        self.engine.offload_states([None, ["optim_states"], ["hp_params", "lp_params"]][pick % 3])
        self.engine.reload_states()

    def on_empty_cache(self, pick: int) -> None:
        self.engine.empty_partition_cache()

    def on_zero_grad(self, pick: int) -> None:
        self.engine.zero_grad()
        self.plain.drop()

    def on_hand(self, pick: int) -> None:
        if self.case.dtype != "fp32" and not self.last:  # the next backward adds to it in 16 bits
            return
        names = [n for n in self.chosen(pick, count=2) if self.params[n].requires_grad]
        scale = float(self.engine.loss_scale())
        for name in names:
            param = self.params[name]
            generator = torch.Generator().manual_seed(pick)
            value = (torch.randn(param.shape, generator=generator) * 0.1).to(param.dtype).float() * scale
            written = value.to(param.dtype)
            before = torch.zeros_like(param) if param.grad is None else param.grad
            param.grad = before + written.to(before.dtype)
            self.plain.grads[name] += (param.grad.double() - before.double()).float()  # as rounded
        self.written |= bool(names)

    def reduced(self) -> bool:
        """Whether gradients may be looked at, after what was written by hand is among them."""
        if self.last and self.written:
            self.engine.allreduce_gradients()
        return self.last

    def on_see_grad(self, pick: int) -> None:
        scale = float(self.engine.loss_scale())
        for name in self.plain.masters if self.reduced() else ():
            grad = safe_get_full_grad(self.params[name])
            expected = self.plain.mean_gradient(name, scale)
            if bool(expected.isfinite().all()):
                self.same(torch.zeros_like(expected) if grad is None else grad, expected, f"gradient of {name}")

    def on_set_grad(self, pick: int) -> None:
        for name in self.chosen(pick) if self.reduced() else ():
            shown = safe_get_full_grad(self.params[name])  # None of a unit that had no part in the window
            if shown is not None and self.params[name].requires_grad and bool(self.plain.grads[name].isfinite().all()):
                value = torch.randn(self.plain.params[name].shape, generator=torch.Generator().manual_seed(pick)) * 0.1
                safe_set_full_grad(self.params[name], value)
                self.plain.grads[name] = value * float(self.engine.loss_scale())

    def on_set_grad_local(self, pick: int) -> None:
        for name in self.chosen(pick) if self.reduced() else ():
            part = safe_get_local_grad(self.params[name])
            if part is not None and self.params[name].requires_grad:
                safe_set_local_grad(self.params[name], part * 0.5)
                self.plain.grads[name] *= 0.5

    def on_fail_forward(self, pick: int) -> None:
        *_, module = (m for m in self.engine.module.modules() if not [*m.children()])
        with failing(module.register_forward_pre_hook(raise_planted)):
            self.forward(MicroBatch(self.step, 50, self.rank, self.world))

    def on_fail_backward(self, pick: int) -> str:
        place = MicroBatch(self.step, 51, self.rank, self.world)
        loss = self.forward(place)[0]
        if self.case.tokens:
            self.engine.set_batch_tokens(tokens_of(place))
        assert loss.grad_fn is not None
        with failing(loss.grad_fn.next_functions[0][0].register_prehook(raise_planted)):
            self.engine.backward(loss)
        with torch.no_grad():
            self.plain.losses(place)  # what a forward writes into weights stays, whatever becomes of its backward
        self.plain.drop()
        return "anew"

    # -- checkpoints and other engines ----------------------------------------------------------------------------
    def on_save(self, pick: int) -> None:
        tag = f"at{self.step}_{len(self.checkpoints)}"
        self.engine.save_checkpoint(self.folder, tag=tag)
        self.checkpoints.append((tag, self.plain.snapshot(), self.ahead))

    def on_load(self, pick: int) -> None:
        if self.checkpoints:
            tag, taken, ahead = self.checkpoints[pick % len(self.checkpoints)]
            assert self.engine.load_checkpoint(self.folder, tag=tag)[0] is not None
            self.plain.restore(taken)
            if ahead:  # weights that are loaded are their masters, rounded
                self.plain.show()
            self.ahead = False

    def on_reload(self, pick: int) -> None:
        self.on_save(pick)
        self.on_load(len(self.checkpoints) - 1)

    def on_reopen(self, pick: int) -> None:
        """Another engine, on another stage, goes on from a checkpoint of this one."""
        self.on_save(pick)
        trains = {name: p.requires_grad for name, p in self.params.items()}
        self.engine.destroy()
        self.case = at_stage(self.case, pick % 4)
        model = self.built()
        for name, param in model.named_parameters():
            param.requires_grad_(param.requires_grad and name not in self.without_state)
        self.engine = self.start(model)
        for name, param in self.params.items():
            param.requires_grad_(trains[name])
        self.on_load(len(self.checkpoints) - 1)

    def on_rebirth(self, pick: int) -> None:
        model = self.engine.module
        self.engine.destroy()
        self.without_state = {name for name, param in model.named_parameters() if not param.requires_grad}
        self.engine = self.start(model)
        self.checkpoints.clear()  # what is trained, and with it the order of slots, may be other parameters now
        self.plain.begin()
        self.ahead = False

    def finish(self) -> dict[str, int]:
        """Compare once more, destroy; checksums of the weights."""
        if self.ahead:
            self.window(Window((Micro(),) * self.gas))
        self.look()
        sums = {name: crc32c(value.contiguous()) for name, value in full_parameters(self.engine.module).items()}
        model = self.engine.module
        self.engine.destroy()
        if not self.case.born and self.case.front != "pipe":
            if self.case.late == "delayed":
                self.plain.show()
            for name, param in model.named_parameters():
                self.same(param, self.plain.params[name], f"after destroy: {name}")
        return sums


@contextlib.contextmanager
def failing(handle: Any) -> Iterator[None]:
    """Inside the planted error comes, or another rank tells that it came there first."""
    try:
        yield
    except (ZeroDivisionError, RankFailedError):
        return
    finally:
        handle.remove()
    raise AssertionError("the planted error did not come out")


def run(case: Case, folder: str) -> tuple[str, dict[str, int]]:
    """What differs, or "", and checksums of the weights at the end. Collective."""
    if case.front == "zenflow":
        rule, clip = case.top["rule"], case.top["gradient_clipping"]
        worst = max(against_statement(case.stage, "fp32", rule, case.layers[0], clip, {}))
        return f"error {worst:.1e}" if worst > ZENFLOW else "", {}
    late = {"DEEPSPEED_UPDATE_BEHIND": "1"} if case.late else {}
    with patch.dict(os.environ, late):
        work = Run(case, folder)
        try:
            for window in case.windows:
                work.window(window)
            sums = work.finish()
        except Exception as error:
            if work.found:
                raise AssertionError(f"an error after {work.found[0]}") from error
            raise
        return "; ".join(work.found[:3]), sums
