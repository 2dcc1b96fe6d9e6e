"""Every exception that a user can meet, with the base that client code catches; and names of what comes later."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn


def nearest_hint(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """``", did you mean 'AdamW'?"``, the candidate that resembles ``name`` most in any case; empty where none does."""
    spelt = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), spelt, 1, cutoff)
    return f", did you mean {spelt[close[0]]!r}?" if close else ""


def counted(number: int, what: str) -> str:
    """``1 unit``, ``1,234 units``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class DeepSpeedError(Exception):
    """Base of all errors raised on purpose by this package."""

    is_shown = False  # on the terminal, as it has ended the script: a launcher need not repeat it


class DeepSpeedConfigError(DeepSpeedError, ValueError):
    """The configuration is wrong: unknown key, wrong type, contradiction. ``faults`` holds the sentences one by one."""

    faults: tuple[str, ...] = ()


class BatchConfigError(DeepSpeedConfigError, AssertionError):
    """The batch triangle train = micro x accumulation x ranks does not close."""


class ConflictingKeysError(DeepSpeedConfigError, AssertionError):
    """Keys of the configuration cannot be combined."""


class OptimizerConfigError(DeepSpeedConfigError, AssertionError):
    """An optimizer or scheduler is unknown, missing or not usable with this configuration."""


class ElasticityError(DeepSpeedConfigError):
    """Something about training on a changing number of ranks."""


class ElasticityConfigError(ElasticityError):
    """The block ``elasticity`` is wrong, or no batch can be kept."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The global batch cannot be kept on this number of ranks."""


class PreemptedExit(SystemExit):
    """Raised by ``step()`` when a checkpoint has been saved because the job is to end; the status says so.

    It is that of no signal, and above 127, which Kubernetes' operators count as worth a restart.
    """

    exit_status = 200


class UsageError(DeepSpeedError, RuntimeError, AssertionError):
    """The engine was called in an order or state that cannot work (step before backward, ...)."""


class ReleasedParameterError(DeepSpeedError, RuntimeError):
    """The values of a sharded parameter were read while they are not on this rank."""


class DivergenceError(DeepSpeedError, RuntimeError):
    """Ranks took different paths, or hold different models, where that was declared an error."""


class RankFailedError(DeepSpeedError, RuntimeError):
    """Another rank raised in its forward, backward or step, so this one gave up the same batch.

    ``window``: what earlier micro-batches have accumulated stays. ``torn``: the others have taken a step without it.
    """

    window = torn = False


class JobHungError(DeepSpeedError, RuntimeError):
    """No rank of the job has made progress for the time of ``hang_timeout``. Ranks end with ``exit_status`` then."""

    exit_status = 88


class NotYetError(DeepSpeedError, NotImplementedError):
    """A documented part of the interface that this release does not contain yet."""


class PipelineError(DeepSpeedError, RuntimeError):
    """A pipeline engine was used in a way it does not support, or one of its ranks failed in the middle of a batch."""


class BuildError(DeepSpeedError, RuntimeError):
    """A native op cannot be built or loaded here; the message holds the compiler's first error."""


class MissingCUDAException(BuildError):
    """There is no CUDA compiler."""


class CUDAMismatchException(BuildError):
    """The CUDA compiler is of a newer major version than torch, and so perhaps than the driver."""


class InvalidStateError(DeepSpeedError, RuntimeError):
    """An internal state machine was asked for an illegal move."""


class CheckpointError(DeepSpeedError, RuntimeError):
    """A checkpoint is incomplete, damaged, of another model, or cannot be written; nothing was loaded or replaced."""


class TagsDifferError(CheckpointError, AssertionError):
    """Ranks save under different tags, and the configuration forbids that."""


class FolderNameError(UsageError, ValueError):
    """A folder was asked for by an empty name, or by None."""


class PlainStateError(CheckpointError, TypeError):
    """State for a checkpoint holds what cannot be stored without pickle; every place is named."""


def raise_not_yet(name: str, instead: str = "") -> NoReturn:
    """Raise ``NotYetError`` for the public ``name``; ``instead`` says what to use until it exists."""
    hint = f" {instead}" if instead else ""
    raise NotYetError(f"{name} is part of the documented interface but this release does not contain it yet.{hint}")


def pending_function(name: str, instead: str = "") -> Callable[..., Any]:
    """A function that can be imported and mocked, and that raises ``NotYetError`` when called."""

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise_not_yet(name, instead)

    missing.__name__ = missing.__qualname__ = name.rpartition(".")[2]
    missing.__doc__ = f"Not in this release: calling it raises NotYetError. {instead}".rstrip()
    return missing


def pending_class(name: str, instead: str = "") -> type:
    """A class for ``isinstance`` and annotations; nothing is an instance of it, as its construction raises."""
    doc = f"Not in this release: constructing it raises NotYetError. {instead}".rstrip()
    module, _, short = name.rpartition(".")
    return type(short, (), {"__init__": pending_function(name, instead), "__doc__": doc, "__module__": module})
