"""Metrics of a run for people and tools: CSV files, TensorBoard, Weights and Biases, Comet; written by rank 0.

An event is (name, value, step); engines count steps in samples, so that runs with other batch sizes compare.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.observe.log import rank

Event = tuple[str, float, int]


def _package(module: str, package: str, block: str, _settings: Any) -> Any:
    """The module that ``block`` needs; DeepSpeedConfigError where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DeepSpeedConfigError(
            f"{block}.enabled needs the package {package}, which cannot be imported here. Install it with: pip "
            f"install {package}"
        ) from error


def _folder(block: str, settings: Any) -> Path:
    """The folder of ``settings``, made; DeepSpeedConfigError where it cannot be."""
    folder = Path(settings.output_path) / settings.job_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeepSpeedConfigError(
            f"{block} cannot make the folder {folder}: {error}. Choose another output_path."
        ) from error
    return folder


class CsvWriter:
    """One file per name in ``folder``; rows are appended, so a resumed run continues its files."""

    def __init__(self, _settings: Any, folder: Path) -> None:
        self._folder = folder

    def write(self, events: Sequence[Event]) -> None:
        """Append one row ``step,value`` per event; a new file begins with a line of titles."""
        for name, value, step in events:
            path = self._folder / f"{name.replace('/', '_')}.csv"
            title = "" if path.exists() else f"step,{name.rpartition('/')[2]}\n"
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{title}{step},{value}\n")

    def close(self) -> None:
        """Nothing is held open between events."""


class TensorBoardWriter:
    """Event files under ``output_path``/``job_name``."""

    def __init__(self, settings: Any, summary: Any) -> None:
        self._writer = summary.SummaryWriter(log_dir=str(Path(settings.output_path) / settings.job_name))
        self.close = self._writer.close

    def write(self, events: Sequence[Event]) -> None:
        """Add the events and put them on disk."""
        for name, value, step in events:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WandbWriter:
    """A run of Weights and Biases in ``project``, owned by ``team``, as part of ``group``."""

    def __init__(self, settings: Any, wandb: Any) -> None:
        self._run = wandb.init(project=settings.project, group=settings.group, entity=settings.team)
        self.close = self._run.finish

    def write(self, events: Sequence[Event]) -> None:
        """Log the events, those of one step together."""
        for step in sorted({step for _, _, step in events}):
            self._run.log({name: value for name, value, at in events if at == step}, step=step)


class CometWriter:
    """An experiment of Comet; a metric is sent when ``samples_log_interval`` samples have passed since its last one."""

    def __init__(self, settings: Any, comet: Any) -> None:
        self._interval = settings.samples_log_interval
        self._sent: dict[str, int] = {}
        names = ("api_key", "workspace", "project", "experiment_key", "mode", "online")
        stated = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
        self._experiment = comet.start(**stated)
        self.close = self._experiment.end
        if settings.experiment_name is not None:
            self._experiment.set_name(settings.experiment_name)

    def write(self, events: Sequence[Event]) -> None:
        """Send the events that are due."""
        for name, value, step in events:
            if name not in self._sent or step - self._sent[name] >= self._interval:
                self._sent[name] = step
                self._experiment.log_metric(name, value, step=step)


# Block of the configuration: what every rank must have, so that what cannot work fails on all; the first one's writer.
_WRITERS: dict[str, tuple[Callable[[str, Any], Any], type[Any]]] = {
    "csv_monitor": (_folder, CsvWriter),
    "tensorboard": (functools.partial(_package, "torch.utils.tensorboard", "tensorboard"), TensorBoardWriter),
    "wandb": (functools.partial(_package, "wandb", "wandb"), WandbWriter),
    "comet": (functools.partial(_package, "comet_ml", "comet_ml"), CometWriter),
}


class MonitorMaster:
    """Hands events to every writer that the configuration enables; ``config`` has the blocks as attributes.

    ``enabled`` is the same on all ranks; only rank 0 writes. DeepSpeedConfigError where a writer cannot work.
    """

    def __init__(self, config: Any) -> None:
        blocks = {name: block for name in _WRITERS if (block := getattr(config, name, None)) and block.enabled}
        self.enabled = bool(blocks)
        needs = {name: _WRITERS[name][0](name, block) for name, block in blocks.items()}
        first = blocks if rank() == 0 else {}
        self._writers = [_WRITERS[name][1](block, needs[name]) for name, block in first.items()]

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write (name, value, step) events."""
        for writer in self._writers:
            writer.write(event_list)

    def close(self) -> None:
        """Write no more. Idempotent."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()
