"""Every exception that a user can meet, with the base that client code catches; and names of what comes later."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn


def nearest_hint(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``", did you mean 'AdamW'?"`` with the candidate most like ``name`` in any case; empty where none is."""
    spelt = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), spelt, 1, cutoff)
    return f", did you mean {spelt[close[0]]!r}?" if close else ""


def counted(number: int, noun: str) -> str:
    """Format a number of things: ``1 unit``, ``1,234 units``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class DeepSpeedError(Exception):
    """Base of all errors raised on purpose by this package."""

    is_shown = False  # on the terminal, as it has ended the script: a launcher need not repeat it


class DeepSpeedConfigError(DeepSpeedError, ValueError):
    """Raised for a wrong configuration: unknown key, wrong type, contradiction. ``faults`` holds each sentence."""

    faults: tuple[str, ...] = ()


class BatchConfigError(DeepSpeedConfigError, AssertionError):
    """Raised when the batch triangle train = micro x accumulation x ranks does not close."""


class ConflictingKeysError(DeepSpeedConfigError, AssertionError):
    """Raised when keys of the configuration cannot be combined."""


class OptimizerConfigError(DeepSpeedConfigError, AssertionError):
    """Raised when an optimizer or scheduler is unknown, missing or not usable with this configuration."""


class ElasticityError(DeepSpeedConfigError):
    """Raised for a fault of training on a changing number of ranks."""


class ElasticityConfigError(ElasticityError):
    """Raised when the block ``elasticity`` is wrong, or no batch can be kept."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """Raised when the global batch cannot be kept on this number of ranks."""


class PreemptedExit(SystemExit):
    """Raised by ``step()`` when a checkpoint has been saved because the job is to end; the status says so.

    The status is that of no signal, and above 127, which Kubernetes' operators count as worth a restart.
    """

    exit_status = 200


class UsageError(DeepSpeedError, RuntimeError, AssertionError):
    """Raised when a call cannot work in this order or state (step before backward, ...) or with these arguments."""


class SequenceError(UsageError, ValueError):
    """Raised when a model, a batch or a number of heads cannot be divided over the ranks that share a sequence."""


class ReleasedParameterError(DeepSpeedError, RuntimeError):
    """Raised when the values of a sharded parameter are read while they are not on this rank."""


class DivergenceError(DeepSpeedError, RuntimeError):
    """Raised when ranks take different paths, or hold different models, where that was declared an error."""


class RankFailedError(DeepSpeedError, RuntimeError):
    """Raised when another rank failed in its forward, backward or step, so that this one gave up the same batch.

    ``window``: gradients of earlier micro-batches stay. ``torn``: the others have taken a step without this rank.
    """

    window = torn = False


class JobHungError(DeepSpeedError, RuntimeError):
    """Raised when no rank has made progress for the time of ``hang_timeout``. Ranks end with ``exit_status`` then."""

    exit_status = 88


class NotYetError(DeepSpeedError, NotImplementedError):
    """Raised for a documented part of the interface that this release does not contain yet."""


class PipelineError(DeepSpeedError, RuntimeError):
    """Raised for a use that a pipeline engine does not support, and when a rank fails in the middle of a batch."""


class BuildError(DeepSpeedError, RuntimeError):
    """Raised when a native op cannot be built or loaded here; the message holds the compiler's first error."""


class MissingCUDAException(BuildError):
    """Raised when there is no CUDA compiler."""


class CUDAMismatchException(BuildError):
    """Raised when the CUDA compiler is of a newer major version than torch, and so perhaps than the driver."""


class InvalidStateError(DeepSpeedError, RuntimeError):
    """Raised when an internal state machine is asked for an illegal move."""


class CheckpointError(DeepSpeedError, RuntimeError):
    """Raised for a checkpoint incomplete, damaged, of another model or unwritable; nothing was loaded or replaced."""


class TagsDifferError(CheckpointError, AssertionError):
    """Raised when ranks save under different tags, and the configuration forbids that."""


class FolderNameError(UsageError, ValueError):
    """Raised for a folder's name that is empty, or no path."""


class PlainStateError(CheckpointError, TypeError):
    """Raised when state for a checkpoint cannot be stored without pickle; every place is named."""


def raise_not_yet(name: str, instead: str = "") -> NoReturn:
    """Raise ``NotYetError`` for the public ``name``; ``instead`` says what to use until it exists."""
    hint = f" {instead}" if instead else ""
    raise NotYetError(f"{name} is part of the documented interface but this release does not contain it yet.{hint}")


def pending_function(name: str, instead: str = "") -> Callable[..., Any]:
    """Make a function that can be imported and mocked, and that raises ``NotYetError`` when called."""

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise_not_yet(name, instead)

    missing.__name__ = missing.__qualname__ = name.rpartition(".")[2]
    missing.__doc__ = f"Not in this release: calling it raises NotYetError. {instead}".rstrip()
    return missing


def pending_class(name: str, instead: str = "") -> type:
    """Make a class for ``isinstance`` and annotations; nothing is an instance of it, as its construction raises."""
    doc = f"Not in this release: constructing it raises NotYetError. {instead}".rstrip()
    module, _, short = name.rpartition(".")
    return type(short, (), {"__init__": pending_function(name, instead), "__doc__": doc, "__module__": module})
