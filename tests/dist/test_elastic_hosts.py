"""Elastic jobs over hosts that are lost and come back: each is a network namespace with an address of its own."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.test_elastic import assert_same_training
from tests.dist.test_launcher_hosts import Hosts, hosts as hosts, idle_hosts as idle_hosts
from tests.harness.elastic import ElasticJob, records
from tests.harness.pool import RankPool

pytestmark = [pytest.mark.timeout(900), pytest.mark.exhaustive]


def _sizes(job: ElasticJob) -> list[int]:
    return [ranks for _, (_, _, ranks) in sorted(records(job.folder).items())]


@pytest.fixture
def through(hosts: Hosts) -> Iterator[str]:
    """What stands for ssh."""
    before = os.environ.get("DS_SSH")
    yield str(hosts.slow_ssh)
    os.environ.pop("DS_SSH", None)
    if before is not None:
        os.environ["DS_SSH"] = before


def test_a_host_that_is_lost_comes_back(tmp_path: Path, hosts: Hosts, through: str, pool1: RankPool) -> None:
    """Over ssh, with the command on host a and ranks on b and c; all on c is killed, and c tried again. Whether b goes
    on alone meanwhile depends on which of them is faster.
    """
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "hosts").write_text("b slots=1\nc slots=1\n")
    enter = ("ip", "netns", "exec", f"{hosts.prefix}a", "env", f"DS_SSH={through}")
    flags = ("--hostfile", "hosts", "--no_ssh_check", "--master_addr", hosts.addresses["a"])
    job = ElasticJob(folder, *flags, words=("--steps", "200", "--pause", "0.1", "--every", "5"), enter=enter)
    job.until(lambda: job.updates() >= 8, "eight updates")
    hosts.kill("c")
    status, out = job.finish(left=1)
    assert status == 0, out
    sizes = _sizes(job)
    assert (sizes[0], sizes[-1]) == (2, 2) and "host c is lost" in out and "starting again from" in out
    assert_same_training(job.folder, pool1, tmp_path / "alone", 200)


def test_nodes_started_by_hand_go_on_without_the_launcher_that_was_killed(tmp_path: Path, hosts: Hosts) -> None:
    where = ("--master_addr", hosts.addresses["a"], "--master_port", "29555", "--num_gpus", "1")
    flags = ("--min_elastic_nodes", "1", "--max_elastic_nodes", "2", *where)
    words = ("--steps", "999", "--pause", "0.1", "--every", "5")
    first, second = (
        ElasticJob(
            tmp_path / "job",
            *(*flags, "--node_rank", str(node)),
            words=words,
            enter=("ip", "netns", "exec", hosts.prefix + host),
            name=host,
        )
        for node, host in enumerate("ab")
    )
    try:
        first.until(lambda: 2 in _sizes(first), "an update of both")  # the one that starts late joins after a save
        second.process.kill()
        hosts.kill("b")
        second.process.wait()
        first.until(lambda: _sizes(first)[-3:] == [1, 1, 1], "updates without it")
        first.process.send_signal(signal.SIGTERM)
        status, out = first.finish()
        assert status == 200, out
        assert "host b#1 (node 1) has not been heard" in out or "starting again from" in out, out
    finally:
        for job in (first, second):
            job.process.kill()
            job.process.wait()
