"""Documented engine methods that this release does not contain yet; each raises one error that names it."""

from typing import Any, NoReturn

from deepspeed.pending import raise_not_yet


class EnginePending:
    """Mixin of the missing part of the client interface. Signatures are final: clients inspect them."""

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> NoReturn:
        raise_not_yet("engine.save_checkpoint")

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> NoReturn:
        raise_not_yet("engine.load_checkpoint")

    def train_batch(self, data_iter: Any = None) -> NoReturn:
        raise_not_yet("engine.train_batch (pipeline engine)")

    def eval_batch(self, data_iter: Any, **_: Any) -> NoReturn:
        raise_not_yet("engine.eval_batch (pipeline engine)")
