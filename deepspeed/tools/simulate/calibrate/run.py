"""One calibration: measure on every rank, put the constants together, write the file on the first."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.accelerator.device import Accelerator, get_accelerator
from deepspeed.checkpoint.format.folders import temporary_for, write_atomically
from deepspeed.comm.collectives import failures, gather_objects
from deepspeed.comm.init import init_distributed
from deepspeed.comm.mesh.groups import Mesh, build_mesh, destroy_mesh
from deepspeed.errors import UsageError
from deepspeed.monitor.hostmem import host_total_bytes
from deepspeed.tools.bench.common import check_folder
from deepspeed.tools.report.probes import cpu_rows
from deepspeed.tools.simulate.calibrate.clock import Clock
from deepspeed.tools.simulate.calibrate.device import LARGE, SMALL, Effort, Measured, measure_device
from deepspeed.tools.simulate.calibrate.host import measure_drive, measure_host, median_of, threads_of
from deepspeed.tools.simulate.calibrate.links import measure_links
from deepspeed.tools.simulate.costs import CONSTANTS, Machine, load_machine

_ASSUMED = "h100"  # whose constants stand where nothing was measured


def calibrate(path: Path, *, folder: str | None = None, effort: Effort | None = None) -> dict[str, Any] | None:
    """Measure this machine, write a machine's file (``costs.load_machine``) to ``path``; return its content, on rank 0.

    Every rank of the job measures at once, so that what ranks share they share here too. ``folder``: on the drive to be
    measured. Nothing is written until all is measured. Raises UsageError where ``path`` or ``folder`` will not do.
    """
    started = not dist.is_initialized()
    accelerator = get_accelerator()
    init_distributed(verbose=False)
    local_ranks = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), dist.get_world_size())
    inner = local_ranks if 1 < local_ranks < dist.get_world_size() else None
    mesh = build_mesh(dist.get_backend(), inner_size=inner)
    effort = effort or (SMALL if accelerator.is_synchronized_device() else LARGE)
    try:
        with _together(mesh):
            if mesh.job.index == 0:
                check_output(path)
            if folder is not None:
                check_folder(folder, effort.file, "the file to be measured with takes", "name another folder")
        begin, load = time.perf_counter(), os.getloadavg()[0]
        findings = _measure(accelerator, mesh, effort, folder=folder, local_ranks=local_ranks)
        rows: list[Measured] = gather_objects(findings, mesh.job)
        if mesh.job.index:
            document = None
        else:
            document = _document(median_of(rows), accelerator, mesh, local_ranks)
            took = round(time.perf_counter() - begin, 1)
            document["measured"] |= {"load_before": round(load, 2), "seconds": took, "details": findings.details}
        with _together(mesh):
            if document is not None:
                write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())
        return document
    finally:
        destroy_mesh(mesh)
        if started:
            dist.destroy_process_group()


@contextlib.contextmanager
def _together(mesh: Mesh) -> Iterator[None]:
    """Turn an error of one rank's files inside into every rank's UsageError."""
    fault: BaseException | None = None
    try:
        yield
    except (UsageError, OSError) as error:
        fault = error
    if texts := failures(fault, mesh.talk):
        raise UsageError(next(iter(texts.values())))


def check_output(path: Path) -> None:
    """Raise UsageError unless a machine's file can be written there, over nothing but another."""
    where = path.absolute().parent
    if path.is_dir() or not where.is_dir():
        fault = "this is a folder" if path.is_dir() else f"there is no folder {where}"
        raise UsageError(f"--calibrate {path}: {fault}")
    try:
        with temporary_for(path) as hidden:
            hidden.touch(exist_ok=False)
    except OSError as error:
        raise UsageError(f"--calibrate {path}: no file can be made in {where} ({error.strerror})") from error
    try:
        load_machine(str(path) if path.exists() else _ASSUMED)
    except UsageError as error:
        raise UsageError(f"--calibrate {path} is there and is no machine's file; give another name") from error


def _measure(accelerator: Accelerator, mesh: Mesh, effort: Effort, *, folder: str | None, local_ranks: int) -> Measured:
    findings = measure_device(accelerator, effort)
    share = local_ranks / _devices(accelerator, local_ranks)
    parts = [measure_host(Clock(Accelerator("cpu")), effort, threads_of(local_ranks), share)]
    if folder is not None:
        parts.append(measure_drive(folder, effort, share))
    parts.append(
        measure_links(
            accelerator, mesh, effort, local_ranks=local_ranks, assumed=load_machine(_ASSUMED),
            kernel_s=findings["kernel_s"],
        )
    )  # fmt: skip
    for part in parts:
        findings.constants |= part.constants
        findings.details |= part.details
    return findings


def _devices(accelerator: Accelerator, local_ranks: int) -> int:
    """Return the number of devices of one node: the visible ones, or as many as ranks, each with its own."""
    return local_ranks if accelerator.is_synchronized_device() else max(accelerator.device_count(), local_ranks)


def _document(findings: Measured, accelerator: Accelerator, mesh: Mesh, local_ranks: int) -> dict[str, Any]:
    """Return the machine's file, with every constant and its source."""
    day, devices, host = time.strftime("%Y-%m-%d"), _devices(accelerator, local_ranks), host_total_bytes()
    on_host = accelerator.is_synchronized_device()
    findings.add("device_bytes", host // devices if on_host else accelerator.total_memory(), "as the system reports it")
    findings.add("host_bytes", host, "as the system reports it")
    findings.add("gpus_per_node", devices, "ranks of this run" if on_host else "devices that this process can see")
    assumed: Machine = load_machine(_ASSUMED)
    constants = {
        name: [findings[name], f"measured {day}: {findings.constants[name][1]}"]
        if name in findings.constants
        else [assumed[name], f"assumed: not measured in this run; {_ASSUMED}'s"]
        for name in CONSTANTS
    }
    product = cpu_rows()[0].value if on_host else accelerator.product_name()
    return {
        "name": f"{product}, {devices} a node, measured {day}",
        "device": accelerator.device_name(),
        "constants": constants,
        "measured": {
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "device": product,
            "ranks": mesh.job.size,
            "backend": mesh.job.backend,
            "cores": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
        },
    }
