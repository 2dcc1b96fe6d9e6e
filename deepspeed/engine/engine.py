"""The training engine: a module, its ZeRO runtime, an optimizer and a schedule, stepped together.

``engine(batch)``, ``engine.backward(loss)``, ``engine.step()`` for every micro-batch; plain ``loss.backward()`` works.
"""

import contextlib
import importlib
import math
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator.device import get_accelerator, map_tensors
from deepspeed.client.attrs import of_part
from deepspeed.client.engine_facts import EngineFacts
from deepspeed.client.step_calls import StepCalls
from deepspeed.client.zero.optimizer import DeepSpeedZeRoOffload, wrap_optimizer
from deepspeed.comm import interrupts
from deepspeed.comm.mesh.groups import Mesh, destroy_mesh, meet_at_end
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.checkpoint import Checkpoints
from deepspeed.engine.checks import Checks
from deepspeed.engine.clocks import PHASES, HostMemoryWatch, PhaseClock
from deepspeed.engine.loss_scale import build_loss_scaler
from deepspeed.engine.outcomes import Outcomes
from deepspeed.engine.token_weights import TokenWeights
from deepspeed.engine.weights import Weights
from deepspeed.errors import DivergenceError, UsageError
from deepspeed.monitor.events import METRICS
from deepspeed.monitor.log import log_dist
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.monitor.timers import ThroughputTimer
from deepspeed.profiling.layer_watch import LayerWatch
from deepspeed.profiling.update_metrics import UpdateMetrics
from deepspeed.zero.build import ZeroParts, dismantle
from deepspeed.zero.hooks import inside_backward
from deepspeed.zero.step import StepOptions, take_step
from deepspeed.zero.sync.failures import serving

# The engine whose ``backward`` runs, and whether it has divided the loss: for others that its graph goes through, too.
running: list[tuple["DeepSpeedEngine", bool]] = []


class DeepSpeedEngine(EngineFacts, nn.Module):
    """Wrap ``module``; made by ``deepspeed.initialize``. Attributes it does not define come from the module."""

    # set by ``initialize``
    local_rank: int
    lr_scheduler: Any = None
    training_dataloader: Any = None
    # of the checkpoint that was loaded
    loaded_checkpoint_dp_world_size: int | None = None
    loaded_checkpoint_mp_world_size: int | None = None

    load_universal_checkpoint = of_part("_checkpoints", Checkpoints.load_universal_checkpoint)
    save_checkpoint = of_part("_checkpoints", Checkpoints.save_checkpoint)
    wait_for_checkpoint = of_part("_checkpoints", Checkpoints.wait_for_checkpoint)
    load_checkpoint = of_part("_checkpoints", Checkpoints.load_checkpoint)
    stream_weights = of_part("_weights", Weights.stream_weights)
    unsharded = of_part("_weights", Weights.unsharded)
    offload_states = of_part("_weights", Weights.offload_states)
    reload_states = of_part("_weights", Weights.reload_states)
    empty_partition_cache = of_part("_weights", Weights.empty_partition_cache)
    save_pretrained = of_part("_weights", Weights.save_pretrained)
    save_16bit_model = save_fp16_model = of_part("_weights", Weights.save_16bit_model)
    _zero3_consolidated_16bit_state_dict = of_part("_weights", Weights.consolidated_16bit_state_dict)
    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict
    module_state_dict = of_part("_weights", Weights.module_state_dict)
    load_module_state_dict = of_part("_weights", Weights.load_module_state_dict)

    def __init__(
        self,
        module: nn.Module,
        config: DeepSpeedConfig,
        *,
        mesh: Mesh,
        parts: ZeroParts,
        optimizer: torch.optim.Optimizer | None,
        monitor: MonitorMaster,
        lasting: contextlib.ExitStack,
    ) -> None:
        """Put the parts together; ``lasting`` is closed when the engine ends."""
        super().__init__()
        self.module, self.mesh = module, mesh
        self.basic_optimizer, self.monitor = optimizer, monitor
        self._config, self._lasting = config, lasting
        self._parts, self._views = parts, parts.views
        self._scaler = build_loss_scaler(config)
        self.runtime, self.device = parts.runtime, get_accelerator().torch_device()
        self._tokens = None if config.normalize == "micro_batches" else TokenWeights(config, self.device, mesh)
        if self._tokens is not None:
            lasting.callback(self._tokens.listen(module, inside_backward))
        self._gas = self._next_gas = config.gradient_accumulation_steps
        self._micro = config.train_micro_batch_size_per_gpu
        self._managed = config.managed_gradient_accumulation
        self._offload = DeepSpeedZeRoOffload(module, parts.hooks)
        self.optimizer: Any = self._offload if self.runtime.plan.regular.param.sharded else None
        if optimizer is not None:
            self.optimizer = wrap_optimizer(optimizer, self, self._views, offload=self._offload)
        self._outcomes, self._updated = Outcomes(), False
        self._step_calls = StepCalls()
        self.global_steps = self.global_samples = self.micro_steps = self._backwards = 0
        self._window_begin = 0  # in micro_steps
        self._scaled_by_user = self._may_overflow = self._syncing_off = False
        self.is_compiled = False
        self._forced_boundary: bool | None = None
        self._compiled = contextlib.ExitStack()  # closed, every forward is what it was
        self._start_measuring(config)
        self._after_update: list[Callable[[], object]] = []
        self._checks = Checks(self)
        self._checkpoints, self._weights = Checkpoints(self), Weights(self)
        self.runtime.window_ends = self.is_gradient_accumulation_boundary
        self.runtime.on_backward = self._before_backward
        self.runtime.client = weakref.ref(self)

    def _start_measuring(self, config: DeepSpeedConfig) -> None:
        self._clock = PhaseClock(config, self.runtime.events)
        self.timers = self._clock.timers
        self._memory_watch = HostMemoryWatch(config.memory.host_limit, self.memory_plan, self.global_rank)
        throughput, every = config.timers.throughput, config.steps_per_print
        # A report that is never due needs no measurement.
        reports = throughput.enabled and every is not None and math.isfinite(every)
        measured = Namespace(enabled=reports, synchronized=throughput.synchronized)
        self.tput_timer = ThroughputTimer(measured, config.train_batch_size, steps_per_output=every)
        self.update_metrics, self.step_profile = UpdateMetrics(config, self.monitor), None
        self.flops_profiler: Any = None
        if config.anomalies.per_layer and config.anomalies.enabled is not False:
            self.runtime.events.append(LayerWatch(self.module, self.runtime, config.anomalies.window))
        if config.flops_profiler.enabled:  # torch's counter takes a while to import
            kind = importlib.import_module("deepspeed.profiling.flops_profiler.in_engine").StepProfile
            self.step_profile = kind(self.module, config, self.mesh.job)
            self.flops_profiler = self.step_profile.profiler
            self._clock.events.append(self.step_profile)
            self._lasting.callback(self.step_profile.close)

    def _give_way(self, params: set[nn.Parameter]) -> bool:
        """Give ``params`` to another engine: an inference engine over no others is destroyed, unless the new one only
        adds to what is frozen and whole, which both can have. Return whether it was destroyed.
        """
        present = set(self.module.parameters())
        if self.basic_optimizer is not None or not params >= present:
            return False
        adds = params > present and not any(p.requires_grad for p in present) and self.mesh.tp.size == 1
        if adds and not any(unit.movable for unit in self.runtime.units):
            return False
        log_dist(f"the inference engine of {type(self.module).__name__} gives way to another one and is destroyed")
        self.destroy()
        return True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward. After an error inside it, the engine and the window's gradients are as before.

        A DivergenceError, or an error that other ranks hear of in their backward, starts the accumulation window anew.
        """
        self._checks.ready()
        if self._config.fp16.auto_cast and self.fp16_enabled():
            inputs, kwargs = map_tensors((inputs, kwargs), lambda t: t.half() if t.is_floating_point() else t)
        if self.module.training:
            self.tput_timer.start()
            if self.update_metrics.wanted:
                self.update_metrics.note_inputs(inputs, kwargs)
            self._step_calls.forward()
        tokens = self._tokens if self.module.training and torch.is_grad_enabled() and not inside_backward() else None
        noted = 0 if tokens is None else tokens.noted
        cast: Any = contextlib.nullcontext()
        if self._config.torch_autocast.enabled:
            cast = torch.autocast(self.device.type, dtype=self.torch_autocast_dtype())
        try:
            with cast, self._clock("forward"):
                return self.module(*inputs, **kwargs)
        except BaseException as error:
            if tokens is not None:
                tokens.withdraw(noted)
            # A recomputation is left by an exception when it has all it needs.
            if isinstance(error, DivergenceError) or not inside_backward():
                self._recover(error, in_forward=not isinstance(error, DivergenceError))
            raise

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Back-propagate ``loss``; return it, divided as it was. After an error the accumulation window starts anew.

        Args:
            loss: A scalar, the mean of the micro-batch. With ``"normalize": "tokens"`` it is weighed by its tokens.
            retain_graph: As in ``torch.Tensor.backward``.
            scale_wrt_gas: Divide the loss by the accumulation steps.
        """
        self._checks.ready("backward()")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            actual = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"backward() takes a scalar loss; got {actual}. Reduce it, e.g. loss.mean()")
        if not loss.requires_grad:
            raise UsageError("backward() got a loss without gradients: compute it without torch.no_grad() and detach()")
        divided = loss / self._gas if scale_wrt_gas and self._managed and self._gas > 1 else loss
        if self._tokens is not None:
            divided = self._tokens.weighed(loss, by_caller=not scale_wrt_gas)
        if self.update_metrics.wanted:
            noted = loss if self._tokens is None else divided
            self.update_metrics.note_loss(noted.detach(), part=not scale_wrt_gas)  # without waiting
        flushes = self.runtime.flushes
        running.append((self, scale_wrt_gas))
        try:
            with self._clock("backward"):
                scaled = divided * self._scaler.loss_scale if self._scaler.loss_scale != 1.0 else divided
                scaled.backward(retain_graph=retain_graph)
                if self.runtime.flushes == flushes or self.runtime.in_backward:
                    self._backwards += self.runtime.flushes == flushes
                    self.runtime.flush()
        except BaseException as error:
            self._recover(error)
            raise
        finally:
            running.pop()
        return loss.detach() if divided is loss or self._tokens is not None else divided

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch; at the accumulation boundary update parameters and schedule, which is collective."""
        self._checks.ready("step()")
        if self._syncing_off:
            raise UsageError("step() was called inside no_sync(); leave the context first")
        self._updated = False
        if self._managed and self._forced_boundary is None:
            self._step_calls.step(self._gas)
        boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            with self._clock("step"):
                self._update()
            if self.lr_scheduler is not None:
                self._outcomes.step_schedule(self.lr_scheduler, self.basic_optimizer, lr_kwargs or {})
        self.micro_steps += 1
        if boundary:
            self._window_begin = self.micro_steps
        self._end_call(updated=boundary)

    def _end_call(self, *, updated: bool) -> None:
        """Tell what watches the run that a micro-batch, or an update, has ended; call what follows an update."""
        every = self._config.steps_per_print
        if updated and every and self.global_steps % every == 0:
            self.timers.log(PHASES)
            rates = f"lr={[float(f'{rate:.6g}') for rate in self.get_lr()]}, mom={self.get_mom()}"
            log_dist(f"step={self.global_steps}, skipped={self.skipped_steps}, {rates}")
        if updated and self.update_metrics.wanted:
            self.update_metrics.report(self, self._clock.take_spent_ms())
        if updated and self._clock.events:
            self._clock.events.begin(METRICS)
        if self.step_profile is not None:
            self.step_profile.micro_batch_ends(self.global_steps if updated else None)
        self.tput_timer.stop(global_step=updated)
        for call in self._after_update if updated else ():  # the last, as it may save
            call()

    def _update(self) -> None:
        """Run one optimizer update from the gradients at hand, or none on overflow. Collective."""
        self._checks.states_here()
        if self._backwards == 0 and not self.runtime.gradients.collect():
            raise UsageError("step() was called before backward(): there are no gradients. Call that first")
        assert self.basic_optimizer is not None
        config, schedule = self._config, self.lr_scheduler
        undoes = schedule is None or hasattr(schedule, "load_state_dict")  # a step too many
        may_overflow, self._may_overflow = self._scaler.dynamic or self._may_overflow, False
        try:
            self._parts.hooks.take_edits()
            if schedule is not None:
                self._outcomes.hear()  # the schedule is as the last update left it
            result = take_step(
                self.runtime,
                self._views,
                StepOptions(
                    clip=config.gradient_clipping,
                    need_norm=config.zero.compute_grad_norm or self.fp16_enabled() or may_overflow,
                    skip_nonfinite=config.bf16.check_grad_overflow or not self.bfloat16_enabled() or may_overflow,
                    loss_scale=self._scaler.loss_scale,
                    at_once=self._scaler.dynamic or not undoes,
                ),
                weight=None if self._tokens is None else self._tokens.total,
            )
        except BaseException as error:
            self._recover(error)
            raise
        samples = self._micro * self.mesh.data.size * (self._gas if self._managed else self._backwards)
        self.tput_timer.batch_size = samples
        self._backwards, self._updated = 0, True
        self._window_begin = self.micro_steps  # also where something behind the update raises
        self._step_calls.restart(stepped=True)
        if self._tokens is not None:
            self._tokens.end_window(result.weight / (self.mesh.job.size * self._gas))
        self._gas = self._next_gas
        self.global_steps += 1
        self.global_samples += samples
        self._outcomes.add(result)
        limit = 0 if self._scaler.dynamic else config.anomalies.nonfinite_updates
        self._outcomes.end_after(limit, self.mesh.job, self.global_steps)
        self._scaler.update(self._scaler.dynamic and result.overflow)
        self._memory_watch.look()

    def _factor(self, *, divides: bool) -> float:
        """Return what this engine multiplies a loss by; ``divides``: also by its share of the window."""
        scale = self._scaler.loss_scale
        if divides and self._tokens is not None:
            return scale * float(self._tokens.weight())
        return scale / self._gas if divides and self._managed else scale

    def _before_backward(self) -> str | None:
        """Note a backward by this engine, another or none, and scale its gradients; return why there must be none."""
        self._checks.states_here()
        if self.basic_optimizer is None:
            return None
        self._backwards += 1
        if self._managed and self._forced_boundary is None:
            self._step_calls.backward(self._gas, local=self._syncing_off)
        scale = self._scaler.loss_scale
        self.runtime.gradients.scale = 1.0
        self.runtime.update.begin_backward(scale)
        caller, divides = running[-1] if running else (None, True)
        if caller is self:
            return None
        scales = caller is not None and (caller.dynamic_loss_scale() or caller.loss_scale() != 1.0)
        self._may_overflow |= scales
        done = scale if caller is None else caller._factor(divides=divides) or 1.0
        if scale != 1.0 and not (self._scaled_by_user or scales):
            return (
                f"loss.backward() was called directly while the loss scale is {scale:g}; call "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._scaled_by_user = False
        self.runtime.gradients.scale = self._factor(divides=divides) / done
        return None

    def set_batch_tokens(self, count: torch.Tensor | int) -> None:
        """Set the number of tokens that the next backward's loss is the mean of, for ``"normalize": "tokens"``.

        For batches whose labels the engine does not see (``labels`` of the model's forward, without -100).
        """
        if self._tokens is None:
            raise UsageError('set_batch_tokens() weighs losses by tokens; it needs "normalize": "tokens"')
        self._tokens.tell(count)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for calling ``.backward()`` on it directly."""
        self._scaled_by_user = True
        return loss * self._scaler.loss_scale

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True while the current micro-batch is the last of its window (or as forced)."""
        forced = self._forced_boundary if self._managed else True
        return self.micro_steps + 1 - self._window_begin >= self._gas if forced is None else forced

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Force the answer of ``is_gradient_accumulation_boundary`` until called again."""
        if not self._managed:
            raise UsageError("with managed_gradient_accumulation: false there is no accumulation boundary to set")
        self._forced_boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients inside on their rank, under every plan; the next backward outside, or the step, reduces.

        Where they are whole (stage 0) ``param.grad`` shows them after each backward, as under torch's DDP.
        """
        if self._syncing_off:
            raise UsageError("no_sync() cannot be nested")
        self._syncing_off = self.runtime.gradients.hold = True
        try:
            yield
        finally:
            self._syncing_off = self.runtime.gradients.hold = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Run several backward calls inside with one reduction on exit. Collective."""
        self.runtime.gradients.hold = True
        try:
            yield
        finally:
            self.runtime.gradients.hold = False
        self.runtime.flush()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce the gradients that are still local now. Collective."""
        self.runtime.gradients.final = True
        self.runtime.flush()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the current window."""
        self._forget_failed_backward()
        self._forget_window()
        self.runtime.gradients.clear()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the accumulation steps so that the global batch is ``train_batch_size`` samples.

        A new window begins with it. One under way keeps its length and divisor; the next one has the new length.
        """
        ranks = self.mesh.data.size
        if train_batch_size < 1 or train_batch_size % (self._micro * ranks):
            raise ValueError(
                f"train_batch_size {train_batch_size} is no multiple of micro batch {self._micro} x {ranks} ranks"
            )
        self._next_gas = train_batch_size // (self._micro * ranks)
        if self._backwards == 0:
            self._gas, self._window_begin = self._next_gas, self.micro_steps

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the number of samples that a micro-batch counts as."""
        self._micro = micro_batch_size

    def train(self, mode: bool = True) -> "DeepSpeedEngine":
        """Set the mode of the module. Collective with ``delayed_update``: evaluations see the last update's result."""
        if not mode:
            self._checks.publish("eval")
        self.training = mode
        self.module.train(mode)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module" and isinstance(value, nn.Module) and "_weights" in self.__dict__:
            trained, sharded = self._weights.module, self.runtime.plan.regular.param.sharded
            if value is not trained and (sharded or trained not in value.modules()):
                raise UsageError(
                    f"engine.module cannot become this {type(value).__name__}, which the engine would not train: "
                    "engine.compile() compiles its module; another module needs a deepspeed.initialize of its own"
                )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        config, module = self.__dict__.get("_config"), self.__dict__.get("_modules", {}).get("module")
        if config is not None and name.startswith("zero_"):
            for key in {name, name[5:]} & type(config.zero).model_fields.keys():
                return lambda: getattr(config.zero, key)
        if module is not None and name != "module":
            return getattr(module, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile in place at the next forward; a second call replaces the first.

        Where no parameter is sharded the module's forward is compiled as a whole. Else the forward of each repeated
        block and of other modules with parameters is, and gathers stay outside. Raises UsageError inside a forward or
        backward, and for CUDA graphs over sharded parameters, whose addresses change.

        Args:
            backend: Of ``torch.compile``; ``compile_kwargs`` are its other keywords.
            schedule: Has to be None, and ``compiled_autograd_enabled`` False: they are not in this release.
        """
        options = dict(compile_kwargs or {})
        self._checks.may_compile(options, absent=schedule is not None or compiled_autograd_enabled)
        self._compiled.close()
        self._compiled.callback(self._parts.hooks.compile(torch.compile(backend=backend, **options)))
        self.is_compiled = True

    def _recover(self, error: BaseException, *, in_forward: bool = False) -> None:
        """Drop what an error has left, on all ranks, and start the accumulation window anew if one was further."""
        worker = self.runtime.worker
        if worker is not None:
            worker.announced = worker.failure is not None
        self._parts.hooks.disarm()
        with serving(worker):
            after = self.runtime.failures.handle(error, in_forward=in_forward)
        if after.torn:
            self._checks.torn = f"a step failed on some ranks and not on others ({after.torn})"
        if not after.window:
            self._forget_window()
            if self._managed:
                self.micro_steps = self._window_begin

    def _forget_window(self) -> None:
        self._backwards = 0
        self.update_metrics.forget()
        self._step_calls.restart()
        if self._tokens is not None:
            self._tokens.forget()

    def _forget_failed_backward(self) -> None:
        """Recover from a plain ``loss.backward()`` that raised, of whose end the engine knows nothing."""
        if self.runtime.in_backward and not inside_backward():
            self._recover(UsageError("an earlier loss.backward() has raised"))

    def _end_update(self) -> Exception | None:
        """Wait for an update under way where all states are given up, bring back what is away; return its failure."""
        self.reload_states()
        try:
            self.runtime.update.wait()
        except UsageError as error:
            return error
        finally:
            self.runtime.update.end_updates()
        return None

    def destroy(self) -> None:
        """Remove every hook and give every buffer, and the optimizer its parameters, back. Collective.

        A model that was whole when it was passed in is whole again; one born sharded (zero.Init) stays sharded, ready
        for another ``initialize``. So does every model when some rank does not come within a minute.
        """
        if self._checks.destroyed:
            return
        if self._checks.generating:
            raise UsageError("destroy() was called inside unsharded(); leave the context first")
        self._checks.end_flow()
        whole = not self._parts.born_sharded and any(u.movable for u in self.runtime.units)
        saving = self._checkpoints.saver.running
        collective = saving or self.mesh.tp.size > 1 or whole or self.runtime.update.collective()
        together = not collective or meet_at_end(self.mesh, comes=not self.runtime.failures.broken)
        announced = self.runtime.worker is not None and self.runtime.worker.announced
        torn: Exception | None = None
        try:
            if together and not self._checks.torn:
                self.runtime.update.publish()
        except UsageError as error:
            torn = error
        torn = self._end_update() or torn
        failed = self._checkpoints.end(together=together) or (None if announced else torn)
        self._outcomes.hear()  # the log is told what was left out
        self._checks.destroyed = True
        self._lasting.close()
        self._clock.events.clear()
        self.runtime.events.clear()
        self._compiled.close()
        self._parts.hooks.remove()
        self._offload.forget()
        self.runtime.reset()
        for view in self._views:
            view.param.grad = None
        self._views.clear()
        self.runtime.update.close()
        dismantle(self._parts, together=together)
        if self.basic_optimizer is not None:
            self.basic_optimizer.state.clear()
        self.runtime.window_ends = lambda: True
        self.runtime.on_backward = self.runtime.before_update = lambda: None
        destroy_mesh(self.mesh, keep_axes=any(unit.params for unit in self.runtime.units))
        interrupts.give_back()
        if failed is not None:
            raise failed
