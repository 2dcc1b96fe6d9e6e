"""Metrics of a run for people and tools: CSV and Prometheus files, TensorBoard, Weights and Biases, Comet; by rank 0.

An event is (name, value, step); engines count steps in samples, so that runs with other batch sizes compare.
"""

import importlib
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.monitor.log import rank, warning_once

Event = tuple[str, float, int]
Writer = tuple[Callable[[Sequence[Event]], None], Callable[[], Any]]  # writes events; ends the report


def _needed(block: str, settings: Any) -> Any:
    """Return the package that ``block`` writes with, or its output folder, made; DeepSpeedConfigError on failure."""
    if module := WRITERS[block][0]:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            package = module.rpartition(".")[2]
            text = f"{block}.enabled needs the package {package}, which cannot be imported here. Install it with: pip"
            raise DeepSpeedConfigError(f"{text} install {package}") from error
    file = getattr(settings, "output_file", None)
    folder = Path(settings.output_path) / settings.job_name if file is None else Path(file).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{block} cannot make the folder {folder}: {error}. Choose another output_path."
        raise DeepSpeedConfigError(text) from error
    if file is not None and (Path(file).is_dir() or not os.access(folder, os.W_OK)):
        raise DeepSpeedConfigError(f"{block} cannot write {file}. Choose another output_file.")
    return folder


def _csv(_settings: Any, folder: Path) -> Writer:
    """Write one file per name in ``folder``, titles first; rows are appended, so a resumed run continues its files."""

    def write(events: Sequence[Event]) -> None:
        for name, value, step in events:
            path = folder / f"{name.replace('/', '_')}.csv"
            title = "" if path.exists() else f"step,{name.rpartition('/')[2]}\n"
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{title}{step},{value}\n")

    return write, lambda: None


def prometheus_name(name: str) -> str:
    """Return a gauge's name: ``Train/Samples/lr`` -> ``deepspeed_lr``, in letters, digits and underscores."""
    return "deepspeed_" + re.sub("[^a-z0-9_]", "_", name.removeprefix("Train/Samples/").lower())


def _prometheus(settings: Any, _folder: Path) -> Writer:
    """Write the newest value of every metric as a gauge (text format 0.0.4); readers see a whole file, old or new."""
    path, newest = Path(settings.output_file), dict[str, tuple[str, float]]()
    odd = {math.inf: "+Inf", -math.inf: "-Inf"}

    def write(events: Sequence[Event]) -> None:
        for name, value, step in events:
            newest[prometheus_name(name)] = (name, value if isinstance(value, int) else float(value))
            newest["deepspeed_samples"] = ("samples trained on", step)
        lines = [
            f"# HELP {key} {' '.join(name.split())}\n# TYPE {key} gauge\n"
            f"{key} {'NaN' if math.isnan(value) else odd.get(value, repr(value))}\n"
            for key, (name, value) in sorted(newest.items())
        ]
        fresh = path.with_name(path.name + ".new")
        fresh.write_text("".join(lines), encoding="utf-8")
        os.replace(fresh, path)

    return write, lambda: None


def _tensorboard(settings: Any, summary: Any) -> Writer:
    """Write event files under ``output_path``/``job_name``, on disk after every call."""
    writer = summary.SummaryWriter(log_dir=str(Path(settings.output_path) / settings.job_name))

    def write(events: Sequence[Event]) -> None:
        for name, value, step in events:
            writer.add_scalar(name, value, step)
        writer.flush()

    return write, writer.close


def _wandb(settings: Any, wandb: Any) -> Writer:
    """Log to a Weights and Biases run in ``project``, of ``team``, part of ``group``; a step's events together."""
    begun = getattr(wandb, "run", None) is not None  # by the user, who ends it: init() may return that one
    run = wandb.init(project=settings.project, group=settings.group, entity=settings.team)

    def write(events: Sequence[Event]) -> None:
        for step in sorted({step for _, _, step in events}):
            run.log({name: value for name, value, at in events if at == step}, step=step)

    return write, (lambda: None) if begun else run.finish


def _comet(settings: Any, comet: Any) -> Writer:
    """Log to a Comet experiment; send a metric when ``samples_log_interval`` samples have passed since its last one."""
    names = ("api_key", "workspace", "project", "experiment_key", "mode", "online")
    running = getattr(comet, "get_running_experiment", lambda: None)()  # the user's, who ends it
    experiment = comet.start(**{n: getattr(settings, n) for n in names if getattr(settings, n) is not None})
    if settings.experiment_name is not None:
        experiment.set_name(settings.experiment_name)
    sent: dict[str, int] = {}

    def write(events: Sequence[Event]) -> None:
        for name, value, step in events:
            if name not in sent or abs(step - sent[name]) >= settings.samples_log_interval:
                sent[name] = step
                experiment.log_metric(name, value, step=step)

    return write, (lambda: None) if experiment is running else experiment.end


# Block of the configuration: the module it needs, where it needs one; and what makes its writer.
WRITERS: dict[str, tuple[str, Callable[[Any, Any], Writer]]] = {
    "csv_monitor": ("", _csv),
    "prometheus": ("", _prometheus),
    "tensorboard": ("torch.utils.tensorboard", _tensorboard),
    "wandb": ("wandb", _wandb),
    "comet": ("comet_ml", _comet),
}


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


class MonitorMaster:
    """Pass events to every writer that the configuration enables; ``monitor_config`` has the blocks as attributes.

    ``enabled`` is the same on all ranks; the ``first`` (or rank 0) writes. Raises DeepSpeedConfigError on all ranks
    where a package is missing or a file cannot be written. A service that refuses it causes a warning and is left out.
    """

    def __init__(self, monitor_config: Any, *, first: bool | None = None) -> None:
        blocks = {name: block for name in WRITERS if (block := getattr(monitor_config, name, None)) and block.enabled}
        self.enabled = bool(blocks)
        needs = {name: _needed(name, block) for name, block in blocks.items()}  # what cannot work fails on all ranks
        self._writers: dict[str, Writer] = {}
        for name, need in needs.items() if (rank() == 0 if first is None else first) else ():
            try:
                self._writers[name] = WRITERS[name][1](blocks[name], need)
            except Exception as error:  # of a service: no login, no network. The other ranks would wait for this one
                warning_once(f"{name} cannot begin ({_in_words(error)}): nothing is written to it; the run goes on")

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write (name, value, step) events. A full disk or a lost service costs events, not the run."""
        for name, (write, _) in self._writers.items():
            try:
                write(event_list)
            except Exception as error:  # packages have errors of their own for a service that is lost
                warning_once(f"{name} cannot write ({_in_words(error)}): it lacks some values; the run goes on")

    def close(self) -> None:
        """End all writers. Idempotent."""
        writers, self._writers = self._writers, {}
        for name, (_, end) in writers.items():
            try:
                end()
            except Exception as error:
                warning_once(f"{name} cannot end ({_in_words(error)}): it may lack its last values")


def _alone(name: str, block: str) -> type[MonitorMaster]:
    """Make the class ``name``: the writer of one block of the configuration, whose keys it has as attributes."""

    def build(self: MonitorMaster, config: Any) -> None:
        vars(self).update(vars(config))
        MonitorMaster.__init__(self, SimpleNamespace(**{block: config}))

    return type(name, (MonitorMaster,), {"__init__": build, "__module__": __name__})


csvMonitor, TensorBoardMonitor = _alone("csvMonitor", "csv_monitor"), _alone("TensorBoardMonitor", "tensorboard")
WandbMonitor, CometMonitor = _alone("WandbMonitor", "wandb"), _alone("CometMonitor", "comet")
