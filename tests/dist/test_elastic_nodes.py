"""Nodes of an elastic job that begin, end and are lost at different moments: several launchers on this machine, started
by hand, whose ranks import no torch.
"""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from deepspeed.comm.init import free_port
from deepspeed.launcher.elastic import membership
from deepspeed.launcher.elastic.membership import Membership
from deepspeed.launcher.elastic.sizes import Elastic
from tests.dist.test_elastic_ranks import LIMIT_S, Started
from tests.harness.patience import slowdown
from tests.harness.warm import Warm

pytestmark = pytest.mark.timeout(300)


class Nodes:
    """The launchers of one job, of one rank each; ``silence_s`` is how long one may be silent.

    Files of a rank are named after its launcher, as which rank of the round it gets is torch's choice.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self._folder, self._python, self._port = folder, python, str(free_port())
        self.silence_s = 2.0 * slowdown()
        self.started: list[Started] = []

    def start(self, *flags: str, mode: str = "", at_least: int = 2, join_s: float = 60.0, name: str = "") -> Started:
        """One more launcher, in a job of at most two."""
        node, name = min(1, len(self.started)), name or str(len(self.started))
        where = ("--master_addr", "127.0.0.1", "--master_port", self._port, "--node_rank", str(node), "--num_gpus", "1")
        sizes = ("--min_elastic_nodes", str(at_least), "--max_elastic_nodes", "2", "--max_ranks", "2")
        more = {
            "TEST_NAME": name,
            "DS_HOST_TIMEOUT_S": str(self.silence_s),
            "DS_JOIN_TIMEOUT_S": str(join_s * slowdown()),
        }
        number = str(len(self.started))
        made = Started(self._folder, self._python, *where, *sizes, *flags, mode=mode, name=number, **more)
        self.started.append(made)
        return made

    def wait_out_silence(self) -> None:
        """As long as a node may be silent, and what it takes to notice."""
        time.sleep(self.silence_s + 2.0)

    def finish(self) -> list[tuple[int, str]]:
        """The status and output of every launcher."""
        for launcher in self.started:
            launcher.process.wait(LIMIT_S)
        return [launcher.finish() for launcher in self.started]


@pytest.fixture
def nodes(tmp_path: Path, warm: Warm) -> Iterator[Nodes]:
    made = Nodes(tmp_path, warm.python)
    yield made
    for launcher in made.started:
        launcher.process.kill()  # its guard ends the ranks
        launcher.process.wait(LIMIT_S)


@pytest.mark.exhaustive
def test_a_node_whose_ranks_have_ended_waits_for_others_and_is_not_taken_for_lost(nodes: Nodes) -> None:
    first, second = nodes.start(), nodes.start()
    first.round(0, 2)
    first.end(0, 0, 0)
    nodes.wait_out_silence()
    second.end(0, 1, 0)
    assert [status for status, _ in nodes.finish()] == [0, 0], first.text.read_text() + second.text.read_text()
    assert not list(first.out.glob("1.*"))


@pytest.mark.exhaustive
def test_a_signal_to_one_launcher_leaves_the_ranks_of_all_nodes_the_time_to_save(nodes: Nodes) -> None:
    """More than one that says nothing has, and a rank that ends later than those of the node with the store."""
    first, second = (nodes.start("--signal_grace", "60", mode="slow") for _ in range(2))
    first.round(0, 2)
    first.process.send_signal(signal.SIGTERM)
    second.until(lambda: len(list(first.out.glob("told.0.*"))) == 2, "the signal at both ranks")
    nodes.wait_out_silence()
    first.end(0, 0, 200)
    time.sleep(1.0)
    second.end(0, 1, 200)
    for status, text in nodes.finish():
        assert status == 200 and "a checkpoint was saved and all ranks have ended, as asked" in text
        assert "gone" not in text and "frame #" not in text
    assert not list(first.out.glob("1.*"))


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.exhaustive
def test_a_node_that_is_lost_while_it_joins_is_left_out(
    store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_HOST_TIMEOUT_S", "3")
    monkeypatch.setattr(membership, "_JOIN_S", 0.0)
    limits = Elastic(min_nodes=1, max_nodes=2, sizes=(1, 2), max_restarts=0)
    other = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    stays, lost = (
        Membership(of, limits, host=host, address="127.0.0.1", devices=(0,), note=str(tmp_path / "note"))
        for of, host in ((store, "stays"), (other, "lost"))
    )

    def join() -> None:  # and say nothing more
        lost._inner.next_rendezvous()
        lost._inner._stop_heartbeats()

    joins = threading.Thread(target=join)
    joins.start()
    stays.next_rendezvous()
    joins.join()
    assert stays.round is not None and stays.round.world == {"stays": (0,)}
    stays.shutdown()


@pytest.mark.exhaustive
def test_nodes_that_wait_to_be_taken_in_end_as_the_job_and_do_not_end_it(nodes: Nodes) -> None:
    first = nodes.start(at_least=1)
    first.round(0, 1)
    goes = nodes.start(at_least=1)
    time.sleep(4.0 * slowdown())
    goes.process.send_signal(signal.SIGTERM)
    assert goes.process.wait(LIMIT_S) == 128 + signal.SIGTERM
    waits = nodes.start(at_least=1, name="1")
    time.sleep(4.0 * slowdown())
    first.end(0, 0, 1)  # the job begins its next round, with the node that waits
    first.round(1, 2)
    more = nodes.start(at_least=1)  # than the job takes
    time.sleep(4.0 * slowdown())
    (first.out / "end").touch()
    statuses = [(launcher.process.wait(LIMIT_S), launcher.text.read_text()) for launcher in (more, waits, first)]
    assert [status for status, _ in statuses] == [0, 0, 0], statuses
    assert "it has not taken this node in" in statuses[0][1]
