"""Metrics of a run for people and tools: CSV files, TensorBoard, Weights and Biases, Comet; written by rank 0.

An event is (name, value, step); engines count steps in samples, so that runs with other batch sizes compare.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.observe.log import rank

Event = tuple[str, float, int]


class Writer(Protocol):
    """Where events go. Made on every rank, so that what cannot work fails on all of them; only rank 0 calls
    ``write``.
    """

    def write(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


class CsvWriter:
    """One file per name under ``output_path``/``job_name``; rows are appended, so a resumed run continues its files."""

    def __init__(self, settings: Any) -> None:
        self._folder = Path(settings.output_path) / settings.job_name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DeepSpeedConfigError(
                f"csv_monitor cannot make the folder {self._folder}: {error}. Choose another output_path."
            ) from error

    def write(self, events: Sequence[Event]) -> None:
        """Append one row ``step,value`` per event; a new file begins with a line of titles."""
        for name, value, step in events:
            path = self._folder / f"{name.replace('/', '_')}.csv"
            title = "" if path.exists() else f"step,{name.rpartition('/')[2]}\n"
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{title}{step},{value}\n")

    def close(self) -> None:
        """Nothing is held open between events."""


def _package(block: str, module: str, package: str) -> Any:
    """The module that ``block`` needs; DeepSpeedConfigError where it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DeepSpeedConfigError(
            f"{block}.enabled needs the package {package}, which cannot be imported here. Install it with: pip "
            f"install {package}"
        ) from error


class TensorBoardWriter:
    """Event files under ``output_path``/``job_name``."""

    def __init__(self, settings: Any) -> None:
        summary = _package("tensorboard", "torch.utils.tensorboard", "tensorboard")
        folder = str(Path(settings.output_path) / settings.job_name)
        self._writer = summary.SummaryWriter(log_dir=folder) if rank() == 0 else None

    def write(self, events: Sequence[Event]) -> None:
        """Add the events and put them on disk."""
        assert self._writer is not None
        for name, value, step in events:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """End the event file."""
        if self._writer is not None:
            self._writer.close()


class WandbWriter:
    """A run of Weights and Biases in ``project``, owned by ``team``, as part of ``group``."""

    def __init__(self, settings: Any) -> None:
        wandb = _package("wandb", "wandb", "wandb")
        self._run = (
            wandb.init(project=settings.project, group=settings.group, entity=settings.team) if rank() == 0 else None
        )

    def write(self, events: Sequence[Event]) -> None:
        """Log the events, those of one step together."""
        assert self._run is not None
        for step in sorted({step for _, _, step in events}):
            self._run.log({name: value for name, value, at in events if at == step}, step=step)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()


class CometWriter:
    """An experiment of Comet. A metric is sent when ``samples_log_interval`` samples have passed since its last
    value.
    """

    def __init__(self, settings: Any) -> None:
        comet = _package("comet", "comet_ml", "comet_ml")
        self._interval = settings.samples_log_interval
        self._sent: dict[str, int] = {}
        self._experiment = None
        if rank() != 0:
            return
        stated = {
            "api_key": settings.api_key,
            "workspace": settings.workspace,
            "project": settings.project,
            "experiment_key": settings.experiment_key,
            "mode": settings.mode,
            "online": settings.online,
        }
        self._experiment = comet.start(**{name: value for name, value in stated.items() if value is not None})
        if settings.experiment_name is not None:
            self._experiment.set_name(settings.experiment_name)

    def write(self, events: Sequence[Event]) -> None:
        """Send the events that are due."""
        assert self._experiment is not None
        for name, value, step in events:
            if name in self._sent and step - self._sent[name] < self._interval:
                continue
            self._sent[name] = step
            self._experiment.log_metric(name, value, step=step)

    def close(self) -> None:
        """End the experiment."""
        if self._experiment is not None:
            self._experiment.end()


_WRITERS: tuple[tuple[str, type[Any]], ...] = (
    ("csv_monitor", CsvWriter),
    ("tensorboard", TensorBoardWriter),
    ("wandb", WandbWriter),
    ("comet", CometWriter),
)


class MonitorMaster:
    """Hands events to every writer that the configuration enables; ``config`` has the blocks as attributes.

    ``enabled`` is the same on all ranks; only rank 0 writes. DeepSpeedConfigError where a writer cannot work.
    """

    def __init__(self, config: Any) -> None:
        blocks = [(getattr(config, name, None), writer) for name, writer in _WRITERS]
        self._writers: list[Writer] = [writer(block) for block, writer in blocks if block is not None and block.enabled]
        self.enabled = bool(self._writers)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write (name, value, step) events."""
        for writer in self._writers if rank() == 0 else ():
            writer.write(event_list)

    def close(self) -> None:
        """Write no more. Idempotent."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()
