"""Blocks about what surrounds the training: IO, memory, checkpoints, monitors, timers."""

from typing import Annotated, Literal

from pydantic import Field

from deepspeed.config.model.unread import AioKeys, CheckpointKeys
from deepspeed.config.model.values import (
    AutoBlock,
    Block,
    Bytes,
    Flag,
    Int,
    Names,
    PathText,
    Positive,
    Text,
    UpperCase,
    inert,
    key,
)


class AioConfig(AioKeys):
    """``aio``: reads and writes of NVMe offload. ``thread_count`` is an old name that nothing ever read."""

    block_size: Int = key(1_048_576, "Bytes of one IO request, rounded up to a multiple of 4096.", ge=1, le=1 << 30)
    queue_depth: Int = key(8, "IO requests under way at once; absent means 32.", ge=1, le=4096)
    intra_op_parallelism: Int = key(1, "Threads for transfers that the kernel's queue cannot take.", ge=1, le=256)


class MemoryConfig(Block):
    """``memory`` (an extension): what one rank may hold, in bytes or as "3GiB"; checked before training starts."""

    host_limit: Bytes | None = key(None, 'Most host memory of one rank, as bytes or "3GiB". Null: see offload.md.')
    device_limit: Bytes | None = key(None, "Most device memory of one rank; on a CPU host_limit counts instead.")


class CheckpointConfig(CheckpointKeys):
    """``checkpoint``: saving and loading. The last six keys, and ``async``, are extensions."""

    tag_validation: Annotated[Literal["WARN", "IGNORE", "FAIL"], UpperCase] = key(
        "WARN", "When ranks save under different tags: WARN and take the first rank's, IGNORE, or FAIL."
    )
    load_universal: Flag = inert(False, "Load the universal format.", "every kind is recognised by its files")
    keep_last: Positive | None = key(None, "Remove all but so many of the newest checkpoints after each save.")
    rate_limit: Bytes | None = key(None, "Most bytes a second that a rank writes in the background; absent: no limit.")
    allow_pickle: Flag = key(False, "Save and load client state that needs pickle; loading it can run any code.")
    client_files: Flag = key(True, "Write small *_states.pt files for programs that look for them.")
    restore_rng: Flag = key(True, "load_checkpoint restores the random number generators of each rank.")
    restore_data: Flag = key(True, "load_checkpoint brings the engine's data loader to where it was.")
    in_background: Flag = key(False, "save_checkpoint copies the state and writes it during training.", alias="async")


class CsvMonitorConfig(AutoBlock):
    """``csv_monitor``: one CSV file per metric under ``output_path``/``job_name``."""

    enabled: Flag = key(False, "Append metrics to CSV files on rank 0.")
    output_path: PathText = key("", "Folder for the files; empty is the working directory.")
    job_name: Text = key("DeepSpeedJobName", "Name of the sub-folder.")


class TensorBoardConfig(CsvMonitorConfig):
    """``tensorboard``: event files under ``output_path``/``job_name``."""

    enabled: Flag = key(False, "Write TensorBoard event files on rank 0.")


class WandbConfig(AutoBlock):
    """``wandb``: Weights and Biases."""

    enabled: Flag = key(False, "Report metrics to Weights and Biases from rank 0.")
    group: Text | None = key(None, "Group of runs.")
    team: Text | None = key(None, "Account or team that owns the run.")
    project: Text = key("deepspeed", "Name of the project.")


class CometConfig(AutoBlock):
    """``comet``: Comet. ``samples_log_interval`` counts samples."""

    enabled: Flag = key(False, "Report metrics to Comet from rank 0.")
    samples_log_interval: Positive = key(100, "Samples between two reports.")
    project: Text | None = key(None, "Name of the project.")
    workspace: Text | None = key(None, "Workspace that owns the project.")
    api_key: Text | None = key(None, "Key of the account; better kept in the environment.", repr=False)
    experiment_name: Text | None = key(None, "Name under which the run is shown.")
    experiment_key: Text | None = key(None, "Identity of the experiment to create or continue.")
    online: Flag | None = key(None, "false stores the report locally; null leaves it to the library.")
    mode: Literal["get", "create", "get_or_create"] | None = key(None, "Create the experiment, continue it, or either.")


class CommsLoggerConfig(AutoBlock):
    """``comms_logger``: a record of every collective."""

    enabled: Flag = key(False, "Record all collectives of engine and deepspeed.comm, for deepspeed.comm.log_summary().")
    prof_all: Flag = key(True, "Record all operations.")
    prof_ops: Names = key((), "Operations to record when prof_all is false.")
    verbose: Flag = key(False, "Log each call as it happens.")
    debug: Flag = key(False, "Name the calling function in each record.")


class ThroughputConfig(AutoBlock):
    """``timers.throughput``: samples per second."""

    enabled: Flag = key(True, "Measure samples per second, reported every steps_per_print steps.")
    synchronized: Flag = key(True, "Wait for the device around each measurement; false counts the host's time only.")


class TimersConfig(Block):
    """``timers``."""

    throughput: ThroughputConfig = Field(default_factory=ThroughputConfig)
