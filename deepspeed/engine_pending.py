"""Documented engine methods that this release does not contain yet; each raises one error that names it."""

from typing import Any, NoReturn

from deepspeed.pending import raise_not_yet


class EnginePending:
    """Mixin of the missing part of the client interface. Signatures are final: clients inspect them."""

    def train_batch(self, data_iter: Any = None) -> NoReturn:
        raise_not_yet("engine.train_batch (pipeline engine)")

    def eval_batch(self, data_iter: Any, **_: Any) -> NoReturn:
        raise_not_yet("engine.eval_batch (pipeline engine)")
