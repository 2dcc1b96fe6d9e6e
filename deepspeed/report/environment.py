"""Environment variables that change what a run does, and who the variables say this process is."""

import re
from collections.abc import Mapping
from functools import partial

from deepspeed.report.rows import Probe, Row, Section, gather

_PREFIXES = (
    "DS_ DEEPSPEED_ NCCL_ TORCH_NCCL_ GLOO_ TORCHELASTIC_ OMP_ KMP_ PYTORCH_ MASTER_ CROSS_ OMPI_COMM_WORLD_ "
    "MV2_COMM_WORLD_ MPI_LOCAL PMI_ PALS_ UCX_ FI_ MALLOC_ SM_HOSTS AZ_BATCH SLURM_STEP SLURM_JOB_"
)
_NAMES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE LOCAL_SIZE GROUP_RANK MKL_NUM_THREADS CUDA_VISIBLE_DEVICES "
    "CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_HOME HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK "
    "ASCEND_RT_VISIBLE_DEVICES CXX SLURM_PROCID SLURM_LOCALID PMIX_RANK PMIX_NAMESPACE AZUREML_EXPERIMENT_ID "
    "GLIBC_TUNABLES LD_PRELOAD TORCH_DISTRIBUTED_DEBUG"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_LOGIN = re.compile(r"(\w://)[^/@\s]+@")
_THREADS = (
    "Without it every rank starts as many threads as there are cores, and ranks on one machine slow each other down; "
    "the deepspeed launcher and torchrun set it, but with srun, mpirun or plain python set it to cores / ranks."
)


def variable_rows(env: Mapping[str, str]) -> list[Row]:
    """The variables of ``env`` that change behaviour, without what looks like a secret or a login in an address."""
    return [
        Row(name, "(hidden)" if _SECRET.search(name) else _LOGIN.sub(r"\1(hidden)@", env[name]))
        for name in sorted(env)
        if (name in _NAMES.split() or name.startswith(tuple(_PREFIXES.split()))) and name != "OMP_NUM_THREADS"
    ]


def threads_row(env: Mapping[str, str]) -> Row:
    """OMP_NUM_THREADS, which a rank started by hand must have."""
    threads = env.get("OMP_NUM_THREADS")
    return Row("OMP_NUM_THREADS", threads or "not set", "" if threads else _THREADS)


def identity_row(env: Mapping[str, str]) -> Row:
    """Who a script started from here would take itself for."""
    from deepspeed.comm.discovery import discover  # noqa: PLC0415 - its package imports torch, which may fail
    from deepspeed.errors import DeepSpeedConfigError  # noqa: PLC0415

    try:
        process = discover(env)
    except DeepSpeedConfigError as error:
        return Row("this process", "contradictory", f"{str(error)[:1].upper()}{str(error)[1:]}.")
    if process.world_size == 1:
        return Row("this process", "alone (rank 0 of 1)")
    where = f"local rank {process.local_rank}, meeting at {process.address}:{process.port}"
    return Row("this process", f"rank {process.rank} of {process.world_size}, {where}")


def section(env: Mapping[str, str]) -> Section:
    """Identity and variables."""
    identity, threads = partial(identity_row, env), partial(threads_row, env)
    probes: dict[str, Probe] = {
        "this process": identity,
        "OMP_NUM_THREADS": threads,
        "variables": partial(variable_rows, env),
    }
    return gather("environment", probes)
