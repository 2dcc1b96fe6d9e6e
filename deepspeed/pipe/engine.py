"""The engine of a PipelineModule: whole batches, in micro-batches that pass the stages by a schedule."""

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch

from deepspeed.accelerator.device import map_tensors
from deepspeed.client.attrs import answers
from deepspeed.client.data_loader import RepeatingLoader
from deepspeed.comm.collectives import failures, gather_objects, is_of_backend, sum_in_place
from deepspeed.comm.mesh.groups import leave_note
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.engine import DeepSpeedEngine, running
from deepspeed.errors import NotYetError, PipelineError, UsageError
from deepspeed.monitor.log import log_dist
from deepspeed.pipe.links import Links
from deepspeed.pipe.module import DualPipeVModule, PipelineModule
from deepspeed.pipe.orders import Micro, Program, chunks_and_style, forward_only
from deepspeed.pipe.run import Pass, PassResult
from deepspeed.pipe.torch_pipelining import make_order
from deepspeed.zero.hooks import tensors_in
from deepspeed.zero.sync.failures import break_off_all


class _Read(NamedTuple):
    """Data that one rank has read for a batch: by micro-batch the inputs' shapes, checksums of inputs and of labels."""

    kinds: list[str]
    inputs: list[int]
    labels: list[int]
    fault: str | None


def follow_config(module: PipelineModule, config: DeepSpeedConfig, *, fixed: bool) -> None:
    """Cut ``module`` as the configuration asks. ``fixed``: its parameters are in an optimizer of the client's already.

    Raises PipelineError where schedule, chunks and stages do not go together.
    """
    if config.normalize != "micro_batches":
        raise PipelineError(
            f"normalize {config.normalize!r} is not in this release for a PipelineModule, which takes the mean of its "
            "micro-batches; leave it out, or weigh the samples in loss_fn"
        )
    block = config.pipeline
    if isinstance(block.stages, int) and block.stages != module.num_stages:
        raise PipelineError(f"pipeline.stages is {block.stages}, but the PipelineModule has {module.num_stages} stages")
    if isinstance(module, DualPipeVModule):
        check_micros(module.num_stages, config.gradient_accumulation_steps)
    name = block.schedule or (
        "dualpipev" if module.chunk_style == "v" else "1f1b" if module.chunks_per_stage == 1 else "interleaved"
    )
    chunks, style = chunks_and_style(name, block.chunks_per_stage or module.chunks_per_stage)
    asked = "pipeline" in config.model_fields_set
    partition = block.partition if asked and block.partition != "best" else None
    seeds = block.seed_layers and not module.seed_layers
    if asked and block.activation_checkpoint_interval > 0:
        module.set_checkpoint_interval(block.activation_checkpoint_interval)
    module.schedule = name
    same_cut = (chunks, style) == (module.chunks_per_stage, module.chunk_style) or module.num_stages == 1 == chunks
    if same_cut and not seeds and partition is None:
        return
    if fixed:
        raise PipelineError(
            f"the schedule {name!r} wants {chunks} chunks per stage dealt out in a {style}, but optimizer= or "
            "model_parameters= hold parameters of another cut. Pass chunks_per_stage= and chunk_style= (and "
            "partition_method=, seed_layers=) to PipelineModule, or let initialize make the optimizer"
        )
    module.recut(chunks, style, method=partition, seeds=seeds)


def check_micros(stages: int, micros: int) -> None:
    """Raise UsageError (an AssertionError) if a DualPipeVModule's batch has too few micro-batches for its schedule."""
    if micros < 2 * stages:
        raise UsageError(
            f"a DualPipeVModule of {stages} stages needs gradient_accumulation_steps of {2 * stages} or more, not "
            f"{micros}; use more, or a PipelineModule with fewer stages or the schedule '1f1b'"
        )


class PipelineEngine(DeepSpeedEngine):
    """Engine of a PipelineModule, made by ``deepspeed.initialize``; its only steps: ``train_batch``, ``eval_batch``."""

    module: PipelineModule

    def __init__(self, module: PipelineModule, config: DeepSpeedConfig, **parts: Any) -> None:
        super().__init__(module, config, **parts)
        mesh = self.mesh
        self.grid = self.mpu = module.mpu()
        self.num_stages, self.stage_id = module.num_stages, mesh.pp.index
        self._links = Links(mesh.pp, module.falling or mesh.pp, mesh.talk, self.device, self._who)
        self._links.dynamic, self._links.events = module.dynamic_shape, self.runtime.events
        self._iterator: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None
        self._kinds: list[str] | None = None  # of the last batch, on every rank
        self._trained: list[bool] = []  # which parameters were, at the last batch
        # Ranks of a stage on these axes read one batch: all of a sequence, unless each of them reads its part.
        self._alike = ("tp",) if module.sharers is not None else ("sp", "tp")
        cut = "; ".join(f"stage {r}: {module.describe(r)}" for r in range(self.num_stages))
        log_dist(f"pipeline: {module.schedule}, {cut}")

    def _who(self, rank: int) -> str:
        return f"rank {self.mesh.pp.ranks[rank]} (pipeline stage {rank}, {self.module.describe(rank)})"

    # -- batches --------------------------------------------------------------------------------------------------
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Run an update of ``gradient_accumulation_steps`` micro-batches; return the mean loss over all ranks, on all.

        ``data_iter`` (or what ``set_dataiterator`` or ``training_data`` gave) yields (inputs, labels); it is read on
        the first and the last stage. Raise StopIteration where it has nothing left, PipelineError on every rank, with
        the stage and layer, where a rank fails; the batch then counts as not run. Collective.
        """
        if not torch.is_grad_enabled():
            raise PipelineError("train_batch() was called under torch.no_grad(); use eval_batch() there")
        self._checks.ready("train_batch()")
        self.train()
        self.tput_timer.start()
        batch, kinds = self._read(data_iter, self._gas)
        with self._clock("forward"):
            kinds = [f"train {kind}" for kind in kinds]
            outcome = self._pass(self._order(len(batch)), batch, kinds, scale=self._scaler.loss_scale / len(batch))
            loss = self._agree(outcome)
        with self._clock("backward"):
            self.runtime.flush()
        self._backwards = self._gas
        self.micro_steps += self._gas - 1
        if self.update_metrics.wanted:
            self.update_metrics.note_loss(loss)
        super().step()
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run forwards; return the mean loss (without ``bcast_loss`` on the last stage), or, with ``reduce_output``
        None, the outputs by micro-batch there; None elsewhere. ``return_logits``: a pair, with the outputs. Collective.
        """
        if reduce_output not in ("avg", None):
            raise NotYetError(f"eval_batch(reduce_output={reduce_output!r}); use 'avg' or None")
        self._checks.ready()
        self.runtime.update.publish()
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                batch, kinds = self._read(data_iter, num_micro_batches or self._gas)
                order = forward_only(self.module.homes, len(batch))
                outcome = self._pass(
                    order, batch, [f"eval {k}" for k in kinds], with_loss=compute_loss and reduce_output is not None,
                    with_outputs=return_logits or reduce_output is None,
                )  # fmt: skip
                loss = self._agree(outcome)
        finally:
            self.module.train(training)
        outputs = [outcome.outputs[m] for m in range(len(batch))] if outcome.outputs else None
        averaged = loss if compute_loss and (bcast_loss or self.is_last_stage()) else None
        if self.monitor.enabled and compute_loss and reduce_output is not None:
            self.monitor.write_events([("Train/Samples/eval_loss", float(loss), self.global_samples)])
        result = outputs if reduce_output is None else averaged
        return (result, outputs) if return_logits else result

    def _order(self, micros: int) -> Program:
        module = self.module
        return make_order(module.schedule, module.num_stages, micros, chunks_per_rank=module.chunks_per_stage)

    def _pass(self, order: Program, batch: list[Micro], kinds: list[str], **wanted: Any) -> PassResult:
        """Run the schedule on this rank, with every parameter whole. ``wanted``: options of ``Pass``."""
        self._links.begin(order, kinds)
        one = Pass(order, self._links, self.module, batch, compute=self._compute, alarm=self._lose, **wanted)
        running.append((self, True))
        try:
            with contextlib.ExitStack() as whole:
                try:
                    whole.enter_context(self.runtime.one_pass())
                except Exception as error:  # ranks of this stage hear it from ZeRO; the other stages wait for messages
                    one.outcome.fault = error
                    self.runtime.failures.handle(error, in_forward=False)
                return one.run()
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            running.pop()

    def _give_up(self, error: BaseException, *, agreed: bool = False) -> None:
        """Count the batch as not run. ``agreed``: all ranks raise; else end every wait for this rank."""
        self._links.forget()
        failed = self.runtime.failures
        if isinstance(error, Exception):
            failed.note_known(error)
            if not agreed:
                failed.lose_batch(error)
                failed.break_off(str(error))
                break_off_all(self.mesh)
        self._recover(error)

    def _agree(self, outcome: PassResult) -> torch.Tensor:
        """Return the mean loss over all ranks; raise PipelineError on all of them if one has failed."""
        mean = float(torch.stack([x.double() for x in outcome.losses.values()]).mean()) if outcome.losses else 0.0
        fault, facts = outcome.fault, (bool(self.runtime.failures.broken), bool(outcome.losses), mean)
        try:
            failed, broken, ranks, total = self._sum([fault is not None, *facts], torch.float64)
            faults = failures(fault, self.mesh.talk) if failed else {}
        except BaseException as error:
            if not is_of_backend(error):
                self._give_up(error)
                raise
            notes = {} if fault is None else {self.mesh.job.ranks[self.mesh.job.index]: str(fault)}
            failure = self._failure(notes | leave_note(self.mesh, ""))
            failure.__cause__ = error
            self._give_up(failure)
            raise failure from error
        if failed or broken:
            self._give_up(failure := self._failure(faults), agreed=True)
            if broken:
                self.runtime.failures.break_off(str(failure))
            raise failure from fault
        mean = total / max(ranks, 1.0)
        return torch.full((), mean, dtype=torch.float32, device=self.device)  # without a wait for the device

    def _failure(self, faults: dict[int, str]) -> PipelineError:
        texts = [f"{self.mesh.title(rank)}: {text}" for rank, text in faults.items()]
        return PipelineError("; ".join(texts[:3]) or "a rank has ended in the middle of the batch")

    def _lose(self, outcome: PassResult) -> None:
        """Note that this rank has lost the batch, also for the ranks that share its layers and may wait for it."""
        fault, mesh = outcome.fault, self.mesh
        sharing = {*mesh.tp.ranks, *mesh.sp.ranks} - {mesh.job.ranks[mesh.job.index]}
        if sharing and fault is not None and is_of_backend(fault.__cause__ or fault):  # it has waited for them
            peers = " or ".join(mesh.title(rank) for rank in sorted(sharing))
            place, cause = str(fault).partition(": ")[0], fault.__cause__
            fault = PipelineError(f"{place}: {peers} does not answer and has ended or is out of reach")
            fault.__cause__ = cause
            outcome.fault = None if leave_note(self.mesh, "") else fault  # where the one that has not come tells why
        self.runtime.failures.lose_batch(fault or PipelineError("another rank has lost what this one needs"))

    def _compute(self, chunk: int, value: Any, batch: Micro) -> Any:
        cast: Any = contextlib.nullcontext()
        if self.torch_autocast_enabled():
            cast = torch.autocast(self.device.type, dtype=self.torch_autocast_dtype())
        with cast:
            return self.module.run_chunk(chunk, value, batch)

    # -- data -----------------------------------------------------------------------------------------------------
    def _read(self, data_iter: Iterator[Any] | None, count: int) -> tuple[list[Micro], list[str]]:
        """Read ``count`` micro-batches to the device (empty ones where this rank reads none), and the kinds of all."""
        batch: list[Micro] = []
        read = None
        if self.stage_id in self.module.readers:
            source = data_iter if data_iter is not None else self._iterator
            if source is None and self.training_dataloader is not None:
                source = self._iterator = iter(RepeatingLoader(self.training_dataloader))
            kinds, inputs, labels, fault = list[str](), list[int](), list[int](), None
            try:
                if source is None:
                    raise UsageError("no data: pass data_iter, or training_data to initialize, or set_dataiterator()")
                for _ in range(count):
                    item = next(source)
                    one = self.module.micro_batch(item if self._batch_fn is None else self._batch_fn(item))
                    kinds.append(repr([(tuple(t.shape), str(t.dtype)) for t in tensors_in(one.inputs)]))
                    inputs.append(_checksum(one.inputs) if self.mesh.tp.size * self.mesh.sp.size > 1 else 0)
                    labels.append(_checksum(one.labels))
                    batch.append(map_tensors(one, lambda t: t.to(self.device, non_blocking=True)))
            except StopIteration:
                fault = f"the data iterator ended after {len(batch)} of {count} micro-batches" if batch else ""
            except Exception as error:
                fault = f"reading micro-batch {len(batch)}: {type(error).__name__}: {error}"
            read = _Read(kinds, inputs, labels, fault)
        if not self._as_before(read, count):
            self._kinds = None
            self._kinds = self._compare(gather_objects((count, read), self.mesh.talk), count)
        kinds = self._kinds or []
        if self._config.fp16.auto_cast and self.fp16_enabled():
            batch = [map_tensors(one, lambda t: t.half() if t.is_floating_point() else t) for one in batch]
        return batch or [Micro(None, None)] * count, kinds

    def _as_before(self, read: _Read | None, count: int) -> bool:
        """Return whether all have inputs of the last kinds, equal labels, and equal inputs where layers are shared."""
        cached = self._kinds is not None and len(self._kinds) == count
        odd = not cached or (read is not None and (read.fault is not None or read.kinds != self._kinds))
        # The first reader of each set counts as often as its others, and against them: a sum is zero where all agree.
        labels = inputs = 0
        peers = [group for name in self._alike if not (group := getattr(self.mesh, name)).alike]
        size, first = prod(group.size for group in peers), not any(group.index for group in peers)
        if read is not None:
            readers, place = self.module.readers, (self.mesh.data.index, self.module.sharers and self.mesh.sp.index)
            leads = first and self.stage_id == readers[0]
            labels = (len(readers) * size - 1 if leads else -1) * _digest(place, read.labels)
            inputs = (size - 1 if first else -1) * _digest(place, self.stage_id, read.inputs)
        before, self._trained = self._trained, [p.requires_grad for p in self.module.parameters()]
        changed, *unlike = self._sum([before != self._trained, odd, labels, inputs if size > 1 else 0], torch.int64)
        if changed:  # and with it which activations need a gradient
            self._links.forget()
        return not any(unlike)

    def _sum(self, numbers: list[Any], dtype: torch.dtype) -> list[Any]:
        """Sum ``numbers`` over all ranks."""
        device = "cpu" if self.mesh.talk.backend in ("gloo", "none") else self.device
        values: list[Any] = sum_in_place(torch.tensor(numbers, dtype=dtype, device=device), self.mesh.talk).tolist()
        return values

    def _compare(self, gathered: list[tuple[int, _Read | None]], count: int) -> list[str]:
        """Return the kinds of this rank's micro-batches. Raise on all ranks where some read less, or other data."""
        ranks = self.mesh.job.ranks
        for rank, (other, _) in zip(ranks, gathered, strict=True):
            if other != gathered[0][0]:
                raise PipelineError(
                    f"{self.mesh.title(ranks[0])} runs {gathered[0][0]} micro-batches and {self.mesh.title(rank)} "
                    f"{other}; call set_train_batch_size() and eval_batch(num_micro_batches=) alike on all ranks"
                )
        readers = {rank: read for rank, (_, read) in zip(ranks, gathered, strict=True) if read is not None}
        if all(read.fault == "" for read in readers.values()):
            raise StopIteration(f"the data iterator has none of {count} micro-batches left")
        ended = f"the data iterator ended after 0 of {count} micro-batches"
        if faults := [f"{self.mesh.title(r)}: {d.fault or ended}" for r, d in readers.items() if d.fault is not None]:
            raise PipelineError("; ".join(faults[:3]))
        grid = self.mesh.topology
        for rank, read in readers.items():
            together = (rank,) if grid is None else grid.axis(rank, "pp", *self._alike).ranks
            sharer = rank if grid is None else grid.axis(rank, *self._alike).ranks[0]
            first = next(r for r in together if r in readers)
            for kind, other, expected, actual in (
                ("inputs of other shapes", first, readers[first].kinds, read.kinds),
                ("other inputs", sharer, readers[sharer].inputs, read.inputs),
                ("other labels", first, readers[first].labels, read.labels),
            ):
                odd = next((m for m in range(count) if expected[m] != actual[m]), None)
                if odd is not None:
                    raise PipelineError(
                        f"{self.mesh.title(other)} and {self.mesh.title(rank)} have read {kind} for micro-batch {odd}; "
                        "ranks of one pipeline work on one batch, so the data iterators of all have to yield the same"
                    )
        self._check_parts(readers)
        return next(readers[r] for r in self.mesh.pp.ranks if r in readers).kinds

    def _check_parts(self, readers: dict[int, _Read]) -> None:
        """Raise where ranks that read parts of one sequence have read the same, which is the whole of it."""
        grid = self.mesh.topology
        if grid is None or self.module.sharers is None:
            return
        for rank, read in readers.items():
            first = grid.axis(rank, "sp").ranks[0]
            if rank != first and read == readers[first] and all(read.inputs) and all(read.labels):
                raise PipelineError(
                    f"{self.mesh.title(first)} and {self.mesh.title(rank)} share sequences and have read the same: "
                    "each has to read its part of the tokens (deepspeed.sequence.batch.part_of, engine.set_batch_fn)"
                )

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Read further batches from ``loader``, again and again."""
        self.training_dataloader = loader
        self._iterator = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read further batches from ``iterator``."""
        self.training_dataloader, self._iterator = None, iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Convert items of the iterator to (inputs, labels) with ``fn``."""
        self._batch_fn = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: masks travel as any other part of an activation."""

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes follow the inputs of each micro-batch."""

    # -- place ----------------------------------------------------------------------------------------------------
    is_first_stage = answers(lambda self: self.module.homes[0] == self.stage_id, "Whether this rank reads the inputs.")
    is_last_stage = answers(lambda self: self.module.homes[-1] == self.stage_id, "Whether it computes the loss.")
    get_pipeline_parallel_rank = answers("stage_id")
    get_additional_losses = answers(
        lambda self: self.module.get_additional_losses(), "What the module reports beside the loss."
    )
    is_gradient_accumulation_boundary = answers(lambda self: True, "A call of ``train_batch`` is a whole window.")

    def forward(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise PipelineError, like ``backward`` and ``step``: only whole batches pass a pipeline."""
        raise PipelineError("a pipeline engine runs whole batches: use train_batch() and eval_batch()")

    backward = step = forward


class DualPipeVEngine(PipelineEngine):
    """Engine of a DualPipeVModule, made by ``deepspeed.initialize``; a batch has two micro-batches a stage or more."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train as a PipelineEngine; raise UsageError if ``set_train_batch_size`` has left too few micro-batches."""
        check_micros(self.num_stages, self._gas)
        return super().train_batch(data_iter)


def _digest(*values: Any) -> int:
    return zlib.crc32(repr(values).encode())


def _checksum(value: Any) -> int:
    """Return the CRC-32 of the tensors in ``value`` that are in host memory."""
    total = 0
    for tensor in tensors_in(value):
        if tensor.device.type == "cpu" and tensor.numel():
            whole = tensor.detach().contiguous().view(-1).view(torch.uint8)
            total = zlib.crc32(whole.numpy().tobytes(), total)
    return total
