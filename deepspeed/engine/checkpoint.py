"""The engine's ``save_checkpoint`` and ``load_checkpoint``."""

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.load import restore
from deepspeed.checkpoint.load.compare import own_facts, same_ranks
from deepspeed.checkpoint.load.reader import open_everywhere
from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.save.client_files import copy_for_later, write_client_files
from deepspeed.checkpoint.save.collect import States
from deepspeed.checkpoint.save.content import content_of, restore_rng
from deepspeed.checkpoint.save.writer import SaveOrder, Saver
from deepspeed.client.lr_schedules import set_rates
from deepspeed.comm.collectives import failures, gather_objects
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.checks import Checks
from deepspeed.errors import CheckpointError, TagsDifferError, UsageError
from deepspeed.monitor.log import log_dist, logger
from deepspeed.tensor.layers import RandomStates
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.sync.failures import together

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Checkpoints:
    """Checkpoints of ``engine``, a DeepSpeedEngine: its counters are saved and restored, beside its states."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.mesh: Mesh = engine.mesh
        self.runtime: Runtime = engine.runtime
        self._checks: Checks = engine._checks
        self._config: DeepSpeedConfig = engine._config
        self._scaler, self._outcomes = engine._scaler, engine._outcomes
        self._tokens = engine._tokens
        self.saver = Saver(self.mesh, engine._parts.tiers.arena)
        self.group_names: list[list[str]] = []  # of each optimizer group, in the caller's order
        self.may_begin = False  # whether the script rightly asks for a checkpoint before there is any
        self._keeper: Any = None
        if self._config.checkpoint.in_background:
            self.runtime.before_update = self.saver.before_update
            # late, so that whoever catches a failed save has not lost a step
            engine._after_update.append(functools.partial(self.saver.settle, wait=False))

    def keep_with(self, keeper: Any) -> None:
        """Let ``keeper`` decide after each update what is saved, until the engine ends (``elasticity.take_part``)."""
        calls = self._engine._after_update
        if self._keeper is not None:
            self._keeper.close()
            calls.remove(self._keeper.at_boundary)
        self._keeper = keeper
        calls.append(keeper.at_boundary)
        self._engine._lasting.callback(keeper.close)

    def load_universal_checkpoint(self) -> bool:
        """Return the key ``checkpoint.load_universal``; every kind of checkpoint is recognised anyway."""
        return self._config.checkpoint.load_universal

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write all that training needs to go on into ``save_dir/tag``; return True. Collective over all ranks.

        The checkpoint gets its name when every byte is on the disk. With ``checkpoint.async`` the state of this moment
        is written while training goes on, and a later call raises a failure. Raises CheckpointError (nothing was
        replaced), and UsageError inside a forward or backward, and where a late update has failed on a rank.

        Args:
            save_dir: A folder that all ranks share.
            tag: The checkpoint's name in it (default ``global_step{N}``).
            client_state: Plain values, tensors and arrays that ``load_checkpoint`` gives back; else PlainStateError.
            save_latest: Whether the file ``latest`` names this checkpoint afterwards.
            exclude_frozen_parameters: Leave out parameters that require no gradient.
        """
        self._checks.alive(alone=False)
        self._checks.states_here()
        folder = self._checks.folder(save_dir, "save_checkpoint").absolute()  # a background save outlives a chdir
        if client_state is not None and not isinstance(client_state, dict):
            raise UsageError(f"client_state is a dict, not {type(client_state).__name__}")
        self._checks.between_passes("save_checkpoint")
        config = self._config.checkpoint
        self._checks.begin_collective()
        name, state = self._common_tag(tag), client_state or {}
        self._checks.publish("save_checkpoint")
        self._engine._parts.hooks.take_edits()
        self.runtime.gradients.land_all()
        with self.runtime.gradients.withdrawn():
            tokens = None if self._tokens is None else self._tokens.state(self.mesh.job)
            content = content_of(
                self.states(),
                lambda: self.facts(state, name, tokens),
                exclude_frozen=exclude_frozen_parameters,
                allow_pickle=config.allow_pickle,
            )
            extra = self._client_files(state) if config.client_files and self.mesh.first else None
            order = SaveOrder(folder, name, save_latest, config.keep_last, config.rate_limit or 0, extra)
            self.saver.save(order, content, background=config.in_background)
        return True

    def _client_files(self, state: dict[str, Any]) -> Callable[..., None]:
        level, whole = self._config.zero_stage, not self.runtime.plan.regular.param.sharded
        kept, bf16 = copy_for_later(state), self._config.bf16.enabled
        return functools.partial(write_client_files, client_state=kept, level=level, whole=whole, bf16=bf16)

    def follow_data(self) -> None:
        """Take over edits of parameters that nobody reported: see ``optimizer.refresh_fp32_params``."""
        self._checks.alive()
        self._checks.between_passes("refresh_fp32_params")
        self._engine._parts.hooks.take_edits(unseen=True)

    def _common_tag(self, tag: str | None) -> str:
        asked = str(tag) if tag is not None else f"global_step{self._engine.global_steps}"
        tags = gather_objects(asked, self.mesh.talk)
        if len(set(tags)) > 1 and self._config.checkpoint.tag_validation != "IGNORE":
            text = f"ranks save under different tags ({', '.join(dict.fromkeys(tags))})"
            if self._config.checkpoint.tag_validation == "FAIL":
                raise TagsDifferError(f"{text}, and checkpoint.tag_validation is FAIL; pass the same tag on every rank")
            logger.warning("%s; the first rank's is taken", text)
        return folders.check_tag(tags[0])

    def wait_for_checkpoint(self) -> None:
        """Wait until a background save has its name. Collective. Raise CheckpointError when it failed."""
        self.saver.settle(wait=True)

    def end(self, *, together: bool) -> CheckpointError | None:
        """Wait for a background save at the engine's end, alone where other ranks do not come; return its failure."""
        try:
            self.saver.settle(wait=True, alone=not together)
        except CheckpointError as error:
            return error
        return None

    def states(self) -> States:
        """Return what is saved and loaded, by its names."""
        engine, runtime = self._engine, self.runtime
        optimizer, views = engine.basic_optimizer, engine._views
        return States(engine.module, self.mesh, runtime.units, views, optimizer, self.group_names, runtime.update)

    def facts(self, client_state: dict[str, Any], tag: str, tokens: dict[str, float] | None = None) -> dict[str, Any]:
        """Return the facts of the engine that ``content_of`` stores."""
        engine = self._engine
        schedule, norm = engine.lr_scheduler, engine.get_global_grad_norm()
        counters = {name: getattr(engine, name) for name in COUNTERS}
        window = {"backwards": engine._backwards, "window": engine._gas, "window_begin": engine._window_begin}
        window |= {"tokens": tokens} if tokens else {}
        cuts = {name: axis.size for name, axis in (("pp", self.mesh.pp), ("tp", self.mesh.tp)) if axis.size > 1}
        last = {"norm": norm if norm is None else float(norm).hex(), "gradient_after": self.runtime.after}
        return {
            "tag": tag,
            "world": {"compute_dtype": self._config.compute_dtype, **cuts},
            "engine": counters | window | last,
            "lr_scheduler": _state_of(schedule),
            "lr_scheduler_type": None if schedule is None else type(schedule).__name__,
            "loss_scaler": self._scaler.state_dict(),
            "data": _state_of(engine.training_dataloader),
            "config": self._config.source,
            "client_state": client_state,
        }

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Restore ``load_dir/tag`` under any number of ranks and any configuration. Collective.

        Returns (path, client state); (None, None) with a warning when there is no checkpoint. A missing, extra or
        mis-shaped tensor is a CheckpointError that lists names; nothing has changed then. Reads DeepSpeed 0.19's, too.

        Args:
            load_dir: The folder that was saved to; ``tag``: the name in it (default: the one in ``latest``).
            load_module_strict: False loads the tensors that fit, and logs the names of those skipped.
            load_optimizer_states: Restore master weights and optimizer state, and the random states with them.
            load_lr_scheduler_states: Restore the learning-rate schedule.
            load_module_only: Load weights alone, without counters; refused where an update has failed half way.
            custom_load_fn: ``custom_load_fn(src=, dst=)`` puts a whole state dict into the module instead.
        """
        self._checks.lives()
        self._engine._forget_failed_backward()
        folder = Path() if load_dir == "" else self._checks.folder(load_dir, "load_checkpoint")
        self._checks.must_load = ""
        self.saver.settle(wait=True)
        self._checks.between_passes("load_checkpoint")
        self._end_update()
        source = open_everywhere(self.mesh, folder, tag, allow_pickle=self._config.checkpoint.allow_pickle)
        if source is None:
            self._say_nothing_loaded(folder)
            return None, None
        optimizer = load_optimizer_states and not load_module_only and self._engine.basic_optimizer is not None
        schedule = load_lr_scheduler_states and not load_module_only

        try:
            loaded = restore.load_into(
                self.states(),
                self.runtime,
                source,
                strict=load_module_strict,
                module=custom_load_fn is None,
                optimizer=optimizer,
                check=functools.partial(self._check_load, source, optimizer=optimizer, schedule=schedule),
                begin=functools.partial(self._begin_load, source.path, optimizer=optimizer),
            )
            if custom_load_fn is not None:
                self._engine.load_module_state_dict(restore.state_dict(loaded), load_module_strict, custom_load_fn)
            with together(self.mesh, f"loading {source.path}"):  # a data position of other data, a damaged gradient
                self._take_facts(loaded, optimizer=optimizer, scheduler=schedule)
                if not load_module_only:
                    self._take_counters(loaded, window=optimizer)
            if self.mesh.tp.size > 1 and optimizer and not same_ranks(loaded.facts, self.mesh):
                RandomStates.agree(self.mesh.tp)  # those that were restored are of ranks that shared nothing
            self._checks.torn = ""
            return str(source.path), restore.client_state(loaded)
        finally:
            source.close()

    def _end_update(self) -> None:
        failed = self._engine._end_update()
        for rank, text in failures(failed, self.mesh.talk).items():  # until all is loaded
            self._checks.torn = str(failed or f"on {self.mesh.title(rank)}: {text}")

    def _say_nothing_loaded(self, folder: Path) -> None:
        absent = f"there is no folder {folder.absolute()}"
        text = f"{folder} has no file 'latest' and no checkpoint" if folder.is_dir() else absent
        log_dist(f"{text}; nothing was loaded", level=logging.INFO if self.may_begin else logging.WARNING)

    def _begin_load(self, path: Path, *, optimizer: bool) -> None:
        """Mark the engine as torn: from here on it changes, and is of no use until all is loaded."""
        if not optimizer and not self._checks.torn:  # its states stay, also those that are on the device
            self.runtime.update.restart()
        if self.runtime.steps == 0:
            self._engine._parts.hooks.take_edits()  # the first step would take them for edits of what is loaded
        self.runtime.update.forget()
        self._engine.zero_grad()
        self._checks.torn = f"loading {path} failed half way"

    def _take_facts(self, source: Source, *, optimizer: bool, scheduler: bool) -> None:
        facts, config = source.facts, self._config.checkpoint
        state, schedule = own_facts(self.states(), source)["lr_scheduler"], self._engine.lr_scheduler
        if scheduler and schedule is not None and state is not None:
            schedule.load_state_dict(state)
            if not optimizer and hasattr(schedule, "get_last_lr"):  # the groups keep their own rates, and should not
                set_rates(self._engine.basic_optimizer, schedule.get_last_lr())
        elif scheduler and (schedule is not None or state is not None):
            why = "this engine has none" if schedule is None else "the checkpoint has no state of it; it begins anew"
            log_dist(f"load_checkpoint leaves out the learning-rate schedule; {why}", level=logging.WARNING)
        if not optimizer:
            return
        if facts.get("loss_scaler"):
            self._scaler.load_state_dict(facts["loss_scaler"])
        rng = restore.of_rank(source, self.mesh.job.index, "rng") if config.restore_rng else None
        if rng is not None:
            restore_rng(rng)
        position_of = self.mesh.job.index if same_ranks(facts, self.mesh) else 0
        data = restore.of_rank(source, position_of, "data") if config.restore_data else None
        loader = self._engine.training_dataloader
        takes = hasattr(loader, "load_state_dict")
        try:
            if data is not None and takes:
                loader.load_state_dict(data)
            elif data is not None or takes and config.restore_data:
                why = "the checkpoint has none; data begin anew" if takes else "no loader here takes it"
                log_dist(f"load_checkpoint leaves out the data position; {why}", level=logging.WARNING)
        except CheckpointError as error:
            advice = "With checkpoint.restore_data false the rest is loaded without it."
            raise CheckpointError(f"{error} {advice}") from error

    def _check_load(self, source: Source, *, optimizer: bool, schedule: bool) -> None:
        if self._checks.torn and not optimizer and self._engine.basic_optimizer is not None:
            raise CheckpointError(
                f"{self._checks.torn}. So may be the optimizer's states, which this load would leave as they are, and "
                "nothing was loaded: load them, too, or begin with a new engine"
            )
        saved, ours = source.facts.get("lr_scheduler_type"), type(self._engine.lr_scheduler).__name__
        if schedule and saved and self._engine.lr_scheduler is not None and saved != ours:
            raise CheckpointError(
                f"checkpoint {source.path} has the state of a {saved}, this engine's schedule is a {ours}, and nothing "
                "was loaded; use the same schedule, or load_lr_scheduler_states=False"
            )

    def _take_counters(self, source: Source, *, window: bool) -> None:
        engine, world = self._engine, source.facts.get("world") or {}
        saved: dict[str, Any] = source.facts.get("engine") or {}
        for name in COUNTERS:
            setattr(engine, name, int(saved.get(name, 0)))
        self.runtime.steps = engine.global_steps
        engine.loaded_checkpoint_dp_world_size = world.get("data", world.get("size"))
        engine.loaded_checkpoint_mp_world_size = world.get("tp", 1)
        norm = saved.get("norm")
        self._outcomes.restore(float.fromhex(norm) if isinstance(norm, str) else norm)
        if not saved.get("window"):  # of DeepSpeed, which saves between two windows and does not say how long they are
            engine.micro_steps = engine.global_steps * engine._gas
        tokens = saved.get("tokens")
        if window and saved.get("backwards") and bool(tokens) is (self._tokens is None):
            logger.warning("the saved window was normalized otherwise, and begins anew")
            window = False
        if tokens and self._tokens is not None:
            self._tokens.restore(tokens, window=window)
        self._take_window(source, saved, taken=window)

    def _take_window(self, source: Source, saved: dict[str, Any], *, taken: bool) -> None:
        """Go on in the open window, if it is ``taken``. One of another length has its gradients scaled to whole
        micro-batches of this engine's.
        """
        engine = self._engine
        done = int(saved.get("backwards") or 0) if taken else 0
        length = int(saved.get("window") or engine._gas)
        factor = 1.0
        engine._window_begin = int(saved.get("window_begin", engine.micro_steps - engine.micro_steps % length))
        if engine._managed and (not taken or length != engine._gas):
            micros = min(done, engine.micro_steps - engine._window_begin) or done  # one may have several losses
            fits = min(micros, engine._gas - 1)
            if fits < micros:
                text = "the window of %d micro-batches has room for %d of the %d that were saved"
                logger.warning(text, engine._gas, fits, micros)
            if not saved.get("tokens"):
                factor = length / engine._gas * fits / (micros or 1)
            engine._window_begin = engine.micro_steps - fits
            done = fits
        if done:
            factor *= self._scaler.loss_scale / float(source.facts["loss_scaler"]["cur_scale"])
            factor *= float(saved["gradient_after"]) / self.runtime.after
            restore.fill_gradients(self.states(), source, self.runtime.gradients, factor=factor)
            engine._backwards = done


def _state_of(thing: Any) -> Any:
    """Return ``state_dict()`` of a scheduler or loader that has one, else None."""
    return thing.state_dict() if thing is not None and hasattr(thing, "state_dict") else None
