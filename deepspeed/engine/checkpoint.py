"""The engine's ``save_checkpoint`` and ``load_checkpoint``."""

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.load import restore
from deepspeed.checkpoint.load.reader import open_everywhere
from deepspeed.checkpoint.load.source import Source
from deepspeed.checkpoint.save.client_files import copy_for_later, write_client_files
from deepspeed.checkpoint.save.collect import States
from deepspeed.checkpoint.save.content import content_of, restore_rng
from deepspeed.checkpoint.save.writer import SaveOrder, Saver
from deepspeed.comm.collectives import failures, gather_objects
from deepspeed.comm.mesh.groups import Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.elastic import SaveKeeper
from deepspeed.errors import CheckpointError, FolderNameError, TagsDifferError, UsageError
from deepspeed.monitor.log import log_dist, logger
from deepspeed.zero.hooks import inside_backward
from deepspeed.zero.runtime import Runtime
from deepspeed.zero.sync.failures import together

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class EngineCheckpoint:
    """Mixin; the other attributes come from the engine."""

    mesh: Mesh
    runtime: Runtime
    _config: DeepSpeedConfig
    _saver: Saver
    _may_begin = False  # whether the script rightly asks for a checkpoint before there is any
    loaded_checkpoint_dp_world_size: int | None = None
    loaded_checkpoint_mp_world_size: int | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _start_checkpoints(self) -> None:
        self._saver = Saver(self.mesh, self._parts.tiers.arena)
        self.runtime.before_update = self._saver.before_update
        self._torn = ""
        self._group_names: list[list[str]] = []
        self._keeper: SaveKeeper | None = None
        # A launcher that has started the script anew after it had saved says so.
        self._must_load = os.environ.get("DS_ELASTIC_SAVED", "")

    def _keep_with(self, keeper: SaveKeeper) -> None:
        """Let ``keeper`` decide after each update what is saved, until the engine ends (``elasticity.take_part``)."""
        if self._keeper is not None:
            self._keeper.close()
        self._keeper = keeper
        self._lasting.callback(keeper.close)

    def _after_update(self) -> None:
        """Settle a background save that has ended, and let the keeper save, after an update. Collective."""
        self._saver.settle(wait=False)  # late, so that whoever catches a failed save has not lost a step
        if self._keeper is not None:
            self._keeper.at_boundary()

    def _refuse_to_begin_anew(self) -> None:
        raise UsageError(
            f"this job has saved {self._must_load} and was started again, and the script trains without having loaded "
            "a checkpoint: it would repeat samples. Call deepspeed.elasticity.take_part(engine, folder), or "
            "engine.load_checkpoint(folder), before the first step"
        )

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
        self._check_alive(alone=False)
        self._check_here()
        if save_dir is None or not str(save_dir):
            raise FolderNameError(f"save_checkpoint needs a save_dir, and got {save_dir!r}")
        if client_state is not None and not isinstance(client_state, dict):
            raise UsageError(f"client_state is a dict, not {type(client_state).__name__}")
        self._check_between_passes("save_checkpoint")
        config = self._config.checkpoint
        self._wait_together()
        name, state = self._common_tag(tag), client_state or {}
        gradients = self.runtime.gradients
        self.runtime.update.publish()
        self._parts.hooks.take_edits()
        shown = gradients.showing
        gradients.withdraw()
        gradients.land_all()
        gradients.collect()
        tokens = None if self._tokens is None else self._tokens.state(self.mesh.job)
        content = content_of(
            self._states(),
            lambda: self._facts(state, name, tokens),
            exclude_frozen=exclude_frozen_parameters,
            allow_pickle=config.allow_pickle,
        )
        extra = None
        if config.client_files and self.mesh.first:
            level, whole = self._config.zero_stage, not self.runtime.plan.regular.param.sharded
            kept, bf16 = copy_for_later(state), self._config.bf16.enabled
            extra = functools.partial(write_client_files, client_state=kept, level=level, whole=whole, bf16=bf16)
        folder = Path(save_dir).absolute()  # a background save must not follow the process elsewhere
        order = SaveOrder(folder, name, save_latest, config.keep_last, config.rate_limit or 0, extra)
        self._saver.save(order, content, background=config.in_background)
        if shown:
            gradients.show()
        return True

    def _follow_data(self) -> None:
        """Take over edits of parameters that nobody reported: see ``optimizer.refresh_fp32_params``."""
        self._check_alive()
        self._check_between_passes("refresh_fp32_params")
        self._parts.hooks.take_edits(unseen=True)

    def _check_between_passes(self, call: str) -> None:
        if self.runtime.depth or self.runtime.in_backward or inside_backward():
            raise UsageError(f"{call}() was called inside a forward or backward of the model; call it between steps")
        self._outcomes.hear()  # so that what an update came to is known, and a schedule stands where it belongs

    def _common_tag(self, tag: str | None) -> str:
        tags = gather_objects(str(tag) if tag is not None else f"global_step{self.global_steps}", self.mesh.talk)
        if len(set(tags)) > 1 and self._config.checkpoint.tag_validation != "IGNORE":
            text = f"ranks save under different tags ({', '.join(dict.fromkeys(tags))})"
            if self._config.checkpoint.tag_validation == "FAIL":
                raise TagsDifferError(f"{text}, and checkpoint.tag_validation is FAIL; pass the same tag on every rank")
            logger.warning("%s; the first rank's is taken", text)
        return folders.check_tag(tags[0])

    def wait_for_checkpoint(self) -> None:
        """Wait until a background save has its name. Collective. Raise CheckpointError when it failed."""
        self._saver.settle(wait=True)

    def _end_save(self, *, together: bool) -> CheckpointError | None:
        """Wait for a background save at the engine's end, alone where other ranks do not come; return its failure."""
        try:
            self._saver.settle(wait=True, alone=not together)
        except CheckpointError as error:
            return error
        return None

    def _states(self) -> States:
        units, optimizer = self.runtime.units, self.basic_optimizer
        return States(self.module, self.mesh, units, self._views, optimizer, self._group_names, self.runtime.update)

    def _facts(self, client_state: dict[str, Any], tag: str, tokens: dict[str, float] | None = None) -> dict[str, Any]:
        """Return the facts of the engine that ``content_of`` stores."""
        schedule, norm = self.lr_scheduler, self.get_global_grad_norm()
        counters = {name: getattr(self, name) for name in COUNTERS}
        window = {"backwards": self._backwards, "window": self._gas, "window_begin": self._window_begin}
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
            "data": _state_of(self.training_dataloader),
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
        self._check_destroyed()
        self._must_load = ""
        self._saver.settle(wait=True)
        self._check_between_passes("load_checkpoint")
        failed = self._end_update()
        for rank, text in failures(failed, self.mesh.talk).items():  # until all is loaded
            self._torn = str(failed or f"on {self.mesh.title(rank)}: {text}")
        pickled = self._config.checkpoint.allow_pickle
        source = open_everywhere(self.mesh, Path(load_dir), tag, allow_pickle=pickled)
        if source is None:
            self._say_nothing_loaded(Path(load_dir))
            return None, None
        optimizer = load_optimizer_states and not load_module_only and self.basic_optimizer is not None
        schedule = load_lr_scheduler_states and not load_module_only

        try:
            loaded = restore.load_into(
                self._states(),
                self.runtime,
                source,
                strict=load_module_strict,
                module=custom_load_fn is None,
                optimizer=optimizer,
                check=functools.partial(self._check_load, source, optimizer=optimizer, schedule=schedule),
                begin=functools.partial(self._begin_load, source.path, optimizer=optimizer),
            )
            if custom_load_fn is not None:
                self.load_module_state_dict(restore.state_dict(loaded), load_module_strict, custom_load_fn)
            with together(self.mesh, f"loading {source.path}"):  # a data position of other data, a damaged gradient
                self._take_facts(loaded, optimizer=optimizer, scheduler=schedule)
                if not load_module_only:
                    self._take_counters(loaded, window=optimizer)
            self._torn = ""
            return str(source.path), restore.client_state(loaded)
        finally:
            source.close()

    def _say_nothing_loaded(self, folder: Path) -> None:
        text = f"{folder} has no file 'latest' and no checkpoint"
        if not folder.is_dir():
            text = f"there is no folder {folder.absolute()}"
        log_dist(f"{text}; nothing was loaded", level=logging.INFO if self._may_begin else logging.WARNING)

    def _begin_load(self, path: Path, *, optimizer: bool) -> None:
        """Mark the engine as torn: from here on it changes, and is of no use until all is loaded."""
        if not optimizer and not self._torn:  # its states stay, also those that are on the device
            self.runtime.update.restart()
        self.runtime.update.forget()
        self.zero_grad()
        self._torn = f"loading {path} failed half way"

    def _take_facts(self, source: Source, *, optimizer: bool, scheduler: bool) -> None:
        facts, config = source.facts, self._config.checkpoint
        state, schedule = facts.get("lr_scheduler"), self.lr_scheduler
        if scheduler and schedule is not None and state is not None:
            schedule.load_state_dict(state)
        elif scheduler and (schedule is not None or state is not None):
            why = "this engine has none" if schedule is None else "the checkpoint has no state of it; it begins anew"
            self._say_skipped(f"the learning-rate schedule; {why}")
        if not optimizer:
            return
        if facts.get("loss_scaler"):
            self._scaler.load_state_dict(facts["loss_scaler"])
        rng = restore.of_rank(source, self.mesh.job.index, "rng") if config.restore_rng else None
        if rng is not None:
            restore_rng(rng)
        world, world_size = facts.get("world") or {}, self.mesh.job.size
        same = int(world.get("size", 0)) == world_size and int(world.get("data", world_size)) == self.mesh.data.size
        position_of = self.mesh.job.index if same else 0  # the first rank's after a change of their number
        data = restore.of_rank(source, position_of, "data") if config.restore_data else None
        try:
            if data is not None and hasattr(self.training_dataloader, "load_state_dict"):
                self.training_dataloader.load_state_dict(data)
            elif data is not None:
                self._say_skipped("the data position; this engine has no loader that takes one")
        except CheckpointError as error:
            advice = "With checkpoint.restore_data false the rest is loaded without it."
            raise CheckpointError(f"{error} {advice}") from error

    def _check_load(self, source: Source, *, optimizer: bool, schedule: bool) -> None:
        if self._torn and not optimizer and self.basic_optimizer is not None:
            raise CheckpointError(
                f"{self._torn}. So may be the optimizer's states, which this load would leave as they are, and nothing "
                "was loaded: load them, too, or begin with a new engine"
            )
        saved, ours = source.facts.get("lr_scheduler_type"), type(self.lr_scheduler).__name__
        if schedule and saved and self.lr_scheduler is not None and saved != ours:
            raise CheckpointError(
                f"checkpoint {source.path} has the state of a {saved}, this engine's schedule is a {ours}, and nothing "
                "was loaded; use the same schedule, or load_lr_scheduler_states=False"
            )

    def _say_skipped(self, skipped: str) -> None:
        if self.mesh.first:
            logger.warning("load_checkpoint leaves out %s", skipped)

    def _take_counters(self, source: Source, *, window: bool) -> None:
        engine, world = source.facts.get("engine") or {}, source.facts.get("world") or {}
        for name in COUNTERS:
            setattr(self, name, int(engine.get(name, 0)))
        self.runtime.steps = self.global_steps
        self.loaded_checkpoint_dp_world_size = world.get("data", world.get("size"))
        self.loaded_checkpoint_mp_world_size = world.get("tp", 1)
        norm = engine.get("norm")
        self._outcomes.restore(float.fromhex(norm) if isinstance(norm, str) else norm)
        # The open window, if it is taken; of another length, its gradients are scaled to whole micro-batches of this.
        if not engine.get("window"):  # of DeepSpeed, which saves between two windows and does not say how long they are
            self.micro_steps = self.global_steps * self._gas
        tokens = engine.get("tokens")
        if window and engine.get("backwards") and bool(tokens) is (self._tokens is None):
            logger.warning("the saved window was normalized otherwise, and begins anew")
            window = False
        if tokens and self._tokens is not None:
            self._tokens.restore(tokens, window=window)
        done, length = int(engine.get("backwards") or 0) if window else 0, int(engine.get("window") or self._gas)
        factor = 1.0
        self._window_begin = int(engine.get("window_begin", self.micro_steps - self.micro_steps % length))
        if self._managed and (not window or length != self._gas):
            fits = min(done, self._gas - 1)
            if fits < done:
                logger.warning(
                    "the window of %d micro-batches has room for %d of the %d that were saved", self._gas, fits, done
                )
            factor = 1.0 if tokens else length / self._gas * (fits / done if done else 1.0)
            self._window_begin = self.micro_steps - fits
            done = fits
        if done:
            factor *= float(engine["gradient_after"]) / self.runtime.after
            restore.fill_gradients(self._states(), source, self.runtime.gradients, factor=factor)
            self._backwards = done


def _state_of(thing: Any) -> Any:
    """Return ``state_dict()`` of a scheduler or loader that has one, else None."""
    return thing.state_dict() if thing is not None and hasattr(thing, "state_dict") else None
