"""Everything that is wrong with a configuration at once, for people: ``load_config`` stops at the first group of
faults.
"""

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed.config.explain.effect import notes_of
from deepspeed.config.explain.messages import at_line
from deepspeed.config.explain.rules import inert_under
from deepspeed.config.model.batch import ACCUMULATION, BATCH_KEYS, MICRO, TRAIN
from deepspeed.config.model.optim_params import PARAM_SPECS
from deepspeed.config.model.root import DeepSpeedConfig, load_config
from deepspeed.config.model.settings import settings
from deepspeed.config.model.values import AUTO
from deepspeed.config.model.zero import ZERO_ALIASES
from deepspeed.config.parse import ConfigSource
from deepspeed.errors import BatchConfigError, DeepSpeedConfigError
from deepspeed.observe.log import logger

# The keys whose "auto" Transformers and Accelerate replace before the configuration reaches the engine.
FILLED_BY_INTEGRATIONS = frozenset(
    {
        *BATCH_KEYS,
        "gradient_clipping",
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        *(
            f"scheduler.params.{name}"
            for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        ),
        "fp16.enabled",
        "bf16.enabled",
        *(
            f"zero_optimization.offload_{what}.{name}"
            for what in ("param", "optimizer")
            for name in ("device", "nvme_path")
        ),
        *(
            f"zero_optimization.{name}"
            for name in (
                "stage",
                "reduce_bucket_size",
                "prefetch_bucket_size",
                "param_persistence_threshold",
                "gather_16bit_weights_on_model_save",
            )
        ),
    }
)
REQUIRED = "required"  # how a parameter without a default says so
# Last parts of paths that are too common to connect two sentences.
_COMMON = frozenset({"enabled", "type", "params", "device"})


@dataclass(frozen=True)
class Findings:
    """The judgement of one source. ``config`` is None when there are faults. ``autos`` are the paths an integration
    fills.
    """

    source: ConfigSource
    config: DeepSpeedConfig | None
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()
    autos: tuple[str, ...] = ()


def written_paths(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every key and list element of ``data``, outer ones first."""
    items = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield f"{prefix}{key}", value
        yield from written_paths(value, f"{prefix}{key}.")


def canonical_path(path: str) -> str:
    """``path`` in the spelling of the table."""
    head, _, tail = path.partition(".")
    if head == "bfloat16":
        return f"bf16.{tail}"
    return f"{head}.{ZERO_ALIASES.get(tail, tail)}" if head == "zero_optimization" else path


def _delete(data: Any, path: str) -> None:
    """Remove ``path`` from ``data``; keys may contain dots themselves."""
    if isinstance(data, dict) and path in data:
        del data[path]
        return
    if isinstance(data, list):
        index, _, rest = path.partition(".")
        if rest:
            _delete(data[int(index)], rest)
        else:
            del data[int(index)]
        return
    for key in [key for key in data if path.startswith(f"{key}.")]:
        _delete(data[key], path[len(key) + 1 :])


@dataclass
class _Gathering:
    """A copy of the configuration from which each faulty key is taken out, so that the next check can run."""

    source: ConfigSource
    data: dict[str, Any]
    faults: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    meant: set[str] = field(default_factory=set)

    def remove(self, path: str) -> None:
        head, _, tail = path.partition(".")
        # Without its name a block could only be called incomplete.
        _delete(self.data, head if tail == "type" and head in ("optimizer", "scheduler") else path)
        self.removed.append(path)

    def follows(self, sentence: str) -> bool:
        """Whether ``sentence`` is about a key that was taken out, and so may only be a consequence."""
        names = set(self.meant)
        names |= {name for path in self.removed for name in (path, path.rpartition(".")[2]) if name not in _COMMON}
        return any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", sentence) for name in names)

    def named_key(self, sentence: str) -> str | None:
        """The key that ``sentence`` begins with, when it is in the configuration."""
        found = [path for path, _ in written_paths(self.data) if sentence.startswith((f"{path} ", f"{path}:"))]
        return max(found, key=len, default=None)

    def take(self, error: DeepSpeedConfigError) -> bool:
        """Note the faults of ``error`` and remove what caused them; whether another round makes sense."""
        sentences = error.faults or (str(error).removeprefix(f"{self.source.name}: "),)
        before = len(self.removed)
        news = [item for item in sentences if item not in self.faults and not self.follows(item)]
        self.faults += news
        self.meant |= {name for item in news for name in re.findall(r"did you mean '([^']+)'", item)}
        if isinstance(error, BatchConfigError):
            again = any(key in self.data for key in (TRAIN, ACCUMULATION)) or self.data.get(MICRO) != 1
            for key in BATCH_KEYS:
                self.data.pop(key, None)
                self.removed.append(key)
            self.data[MICRO] = 1
            return again
        for path in dict.fromkeys(filter(None, map(self.named_key, sentences))):
            self.remove(path)
        return len(self.removed) > before

    def take_autos(self) -> list[str]:
        """Remove each "auto" that an integration replaces; their paths as written."""
        found = [path for path, value in written_paths(self.data) if value == AUTO and isinstance(value, str)]
        found = [path for path in found if canonical_path(path) in FILLED_BY_INTEGRATIONS]
        for path in found:
            self.remove(path)
            spec = PARAM_SPECS.get(path)
            if spec is not None and spec.default == REQUIRED:
                part, _, name = path.partition(".params.")
                self.data[part]["params"][name] = 1  # stands for the number to come
        if set(found) & set(BATCH_KEYS) and TRAIN not in self.data and MICRO not in self.data:
            self.data[MICRO] = 1
        return found


@contextmanager
def _captured(said: list[str]) -> Iterator[None]:
    """What the parser logs goes to ``said`` instead of the terminal."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    before = list(logger.handlers)
    logger.handlers[:] = [Collect()]
    try:
        yield
    finally:
        logger.handlers[:] = before


def _with_line(source: ConfigSource, sentence: str) -> str:
    """``sentence`` with the line of the first key it names, unless it has one."""
    if re.search(r"\(line \d+\)$|\blines? \d+", sentence):
        return sentence
    named = [word.rstrip(".") for word in re.findall(r"[A-Za-z_][\w.]*", sentence)]
    path = next((word for word in named if word in source.lines), None)
    return sentence if path is None else at_line(source, path, sentence)


def examine(source: ConfigSource, *, world_size: int, resolved: bool = False) -> Findings:
    """All faults of ``source`` for ``world_size`` data-parallel ranks, and what is worth saying when there are none.

    "auto" is accepted where an integration fills it in, unless ``resolved``. A fault that can only be the consequence
    of another one (a batch that does not close because a size is misspelt) is left out.
    """
    state = _Gathering(source, copy.deepcopy(source.data))
    autos = state.take_autos()
    if resolved:
        why = (
            'is still "auto". Only an integration (Transformers, Accelerate) fills that in; write a value or '
            "delete the key."
        )
        state.faults += [at_line(source, path, f"{path} {why}") for path in autos]
    config: DeepSpeedConfig | None = None
    said: list[str] = []
    with _captured(said):
        while config is None:
            try:
                config = load_config(replace(source, data=state.data), world_size=world_size)
            except DeepSpeedConfigError as error:
                if not state.take(error):
                    break
        if config is None and not state.faults:  # all that is missing are values that an integration fills in
            try:
                config = load_config(source, world_size=world_size, lenient=True)
            except DeepSpeedConfigError as error:
                state.faults += error.faults or (str(error),)
    if config is None or state.faults:
        return Findings(source, None, tuple(_with_line(source, item) for item in state.faults))
    if "pipeline" in source.data:
        said.append(
            "the block 'pipeline' is valid and asks for nothing: models are not cut into pipeline stages in "
            "this release"
        )
    notes = [
        *dict.fromkeys(said),
        *notes_of({item.path: item for item in settings(config, source)}, idle=inert_under(config)),
    ]
    return Findings(source, config, (), tuple(notes), tuple(autos))


def batch_is_open(findings: Findings) -> bool:
    """Whether the batch sizes wait for an integration."""
    return any(path in findings.autos for path in (TRAIN, MICRO, ACCUMULATION))
