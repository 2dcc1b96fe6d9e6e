"""Environment variables that change what a run does, and who the variables say this process is."""

import re
from collections.abc import Mapping

from deepspeed.report.rows import Row, Section, gather

_PREFIXES = (
    "DS_ DEEPSPEED_ NCCL_ TORCH_NCCL_ GLOO_ TORCHELASTIC_ OMP_ KMP_ PYTORCH_ MASTER_ CROSS_ OMPI_COMM_WORLD_ "
    "MV2_COMM_WORLD_ MPI_LOCAL"
)
_PREFIXES += " PMI_ PALS_ UCX_ FI_ MALLOC_ SM_HOSTS AZ_BATCH SLURM_STEP SLURM_JOB_"
_NAMES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE LOCAL_SIZE GROUP_RANK MKL_NUM_THREADS CUDA_VISIBLE_DEVICES "
    "CUDA_DEVICE_ORDER"
)
_NAMES += (
    " CUDA_LAUNCH_BLOCKING CUDA_HOME HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK "
    "ASCEND_RT_VISIBLE_DEVICES CXX"
)
_NAMES += (
    " SLURM_PROCID SLURM_LOCALID PMIX_RANK PMIX_NAMESPACE AZUREML_EXPERIMENT_ID GLIBC_TUNABLES LD_PRELOAD "
    "TORCH_DISTRIBUTED_DEBUG"
)
PREFIXES, NAMES = tuple(_PREFIXES.split()), frozenset(_NAMES.split())
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_LOGIN = re.compile(r"(\w://)[^/@\s]+@")


def masked(name: str, value: str) -> str:
    """``value`` as it may be shown: nothing of what looks like a secret, and no login inside an address."""
    return "(hidden)" if _SECRET.search(name) else _LOGIN.sub(r"\1(hidden)@", value)


def variable_rows(env: Mapping[str, str]) -> list[Row]:
    """The variables of ``env`` that change behaviour, by name."""
    chosen = sorted(name for name in env if name in NAMES or name.startswith(PREFIXES))
    return [Row(name, masked(name, env[name])) for name in chosen]


def threads_row(env: Mapping[str, str]) -> Row:
    """OMP_NUM_THREADS, which a rank started by hand must have."""
    if env.get("OMP_NUM_THREADS"):
        return Row("OMP_NUM_THREADS", env["OMP_NUM_THREADS"])
    doubt = (
        "Without it every rank starts as many threads as there are cores, and ranks on one machine slow each "
        "other down; the deepspeed "
        "launcher and torchrun set it, but with srun, mpirun or plain python set it to cores / ranks."
    )
    return Row("OMP_NUM_THREADS", "not set", doubt)


def identity_row(env: Mapping[str, str]) -> Row:
    """Who a script started from here would take itself for."""
    from deepspeed.comm.discovery import discover  # noqa: PLC0415 - its package imports torch, which may fail
    from deepspeed.errors import DeepSpeedConfigError  # noqa: PLC0415

    try:
        found = discover(env)
    except DeepSpeedConfigError as error:
        return Row("this process", "contradictory", f"{str(error)[:1].upper()}{str(error)[1:]}.")
    if found.world_size == 1:
        return Row("this process", "alone (rank 0 of 1)")
    where = f"local rank {found.local_rank}, meeting at {found.address}:{found.port}"
    return Row("this process", f"rank {found.rank} of {found.world_size}, {where}")


def section(env: Mapping[str, str]) -> Section:
    """Identity and variables."""
    probes = (
        ("this process", lambda: identity_row(env)),
        ("OMP_NUM_THREADS", lambda: threads_row(env)),
        ("variables", lambda: [row for row in variable_rows(env) if row.name != "OMP_NUM_THREADS"]),
    )
    return gather("environment", probes)
