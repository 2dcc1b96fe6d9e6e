"""Which ranks an elastic job starts, and how it ends: its launcher alone, with ranks that import no torch."""

import json
import os
import signal
import socket
import subprocess
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerState

from deepspeed.launcher.elastic.agent import NodeAgent
from deepspeed.launcher.elastic.membership import JOIN, Membership
from deepspeed.launcher.elastic.sizes import Elastic
from deepspeed.launcher.node.ranks import Guard
from deepspeed.launcher.node.verdict import RankEnd
from tests.harness.launched import RUNNER, environment, wait_until
from tests.harness.patience import slowdown
from tests.harness.warm import Warm

pytestmark = pytest.mark.timeout(300)
LIMIT_S = 150.0  # a machine that is busy with much else takes minutes for what takes seconds

# Rank 0 says that a checkpoint was saved as soon as the test has made a file ``save``; all end with the file ``end``,
# and, as if a connection had broken, with a file ``broken.ROUND``, and a rank with its ``status.ROUND.RANK``. Those
# that save end at once with 200 when they are told to, slow ones only note it (``told.ROUND.RANK``).
RANK = """
import json, os, signal, sys, time

out, mode = sys.argv[-2:]
rank, attempt = os.environ.get("TEST_NAME", os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
def told(*_):
    open(f"{out}/told.{attempt}.{rank}", "w").close()
    if mode == "saves":
        sys.exit(200)
if mode in ("saves", "slow"):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, told)
with open(f"{out}/.{attempt}.{rank}", "w") as file:
    json.dump([os.getpid(), int(os.environ["WORLD_SIZE"]), os.environ.get("DS_ELASTIC_SAVED", "")], file)
os.rename(file.name, f"{out}/{attempt}.{rank}")
if mode == "raises" and rank == "1":
    raise ValueError("the cause")
while mode != "raises" and not os.path.exists(f"{out}/end"):
    if os.path.exists(f"{out}/broken.{attempt}"):
        sys.exit(1)
    if os.path.exists(f"{out}/status.{attempt}.{rank}"):
        with open(f"{out}/status.{attempt}.{rank}") as file:
            os._exit(int(file.read()))
    if rank == "0" and os.path.exists(f"{out}/save"):
        with open(os.environ["DS_CHECKPOINT_NOTE"] + ".new", "w") as file:
            file.write("ckpt/step6")
        os.rename(f"{out}/save", f"{out}/saved")
        os.rename(file.name, os.environ["DS_CHECKPOINT_NOTE"])
    time.sleep(0.01)
"""


class Started:
    """A ``deepspeed --elastic_training`` command; what its ranks leave is in ``out``, temporary files in ``tmp``.

    ``name``: of a launcher among several of one job, in one folder; ``more``: variables.
    """

    def __init__(self, folder: Path, python: str, *flags: str, mode: str = "", name: str = "", **more: str) -> None:
        self.out, self.tmp, self.text = folder / "out", folder / f"tmp{name}", folder / f"text{name}"
        self.out.mkdir(exist_ok=True)
        self.tmp.mkdir()
        script = folder / "script.py"
        script.write_text(RANK)
        env = environment(TMPDIR=str(self.tmp), **more)
        command = [python, *RUNNER, "--elastic_training", *flags, str(script), str(self.out), mode]
        with self.text.open("w") as text:
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=text, stderr=text
            )

    def round(self, number: int, ranks: int) -> list[int]:
        """The processes of the ranks of this round, as soon as all have started; there are ``ranks`` of them."""
        self.until(lambda: len(list(self.out.glob(f"{number}.*"))) == ranks, f"round {number}")
        found = [json.loads((self.out / f"{number}.{rank}").read_text()) for rank in range(ranks)]
        assert {world for _, world, _ in found} == {ranks}
        return [pid for pid, _, _ in found]

    def end(self, number: int, rank: int, status: int) -> None:
        """Have this rank end with that status."""
        (self.out / ".status").write_text(str(status))
        (self.out / ".status").rename(self.out / f"status.{number}.{rank}")

    def lose(self, number: int, pid: int) -> None:
        """Kill a rank of this round; the others notice."""
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.3 * slowdown())
        (self.out / f"broken.{number}").touch()

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.text.read_text()}"
            if time.monotonic() > end:
                self.process.kill()  # its guard ends the ranks
                self.process.wait()
                raise AssertionError(f"waited for {what}:\n{self.text.read_text()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL to the command, whose guard then ends the ranks and removes the temporary files."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        pids = [json.loads(file.read_text())[0] for file in self.out.glob("[0-9]*.*")]
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), LIMIT_S, "the ranks to end")
        wait_until(lambda: not any(self.tmp.iterdir()), LIMIT_S, "the temporary files to go")

    def finish(self) -> tuple[int, str]:
        """Status and output; no rank and no temporary file is left."""
        status, text = self.process.wait(LIMIT_S), self.text.read_text()
        pids = [json.loads(file.read_text())[0] for file in self.out.glob("[0-9]*.*")]
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], text
        assert not list(self.tmp.iterdir()), text
        return status, text


def test_a_killed_rank_is_left_out_and_tried_again_after_a_checkpoint(tmp_path: Path, warm: Warm) -> None:
    job = Started(tmp_path, warm.python, "--num_gpus", "3", "--max_restarts", "1", mode="saves")
    job.lose(0, job.round(0, 3)[1])
    first = job.round(1, 2)
    (job.out / "save").touch()
    pids = job.round(2, 3)
    assert not set(first) & set(pids)
    assert [json.loads((job.out / f"{number}.0").read_text())[2] for number in range(3)] == ["", "", "ckpt/step6"]
    job.lose(2, pids[2])  # a second restart: it counts anew from the checkpoint on
    job.round(3, 2)
    (job.out / "end").touch()
    status, text = job.finish()
    assert status == 0, text
    assert "failed first, with signal SIGKILL; starting again from the beginning (1 of 1 restarts" in text
    assert "starting again from ckpt/step6 (1 of 1 restarts" in text


def test_a_checkpoint_is_seen_also_before_the_first_look_of_a_round_and_counts_for_its_own_round(
    tmp_path: Path,
) -> None:
    store, note = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), tmp_path / "note"
    limits = Elastic(min_nodes=1, max_nodes=1, sizes=(1, 2), max_restarts=3)
    node = Membership(store, limits, host="a", address="127.0.0.1", devices=(0, 1), note=str(note))
    node.next_rendezvous()
    note.write_text("ckpt/step1")  # and a rank is lost at once
    assert node.count_crash() == 1 and node.saved == "ckpt/step1"
    node.end_round("a rank failed")
    node.lose([1])
    note.write_text("ckpt/step2")  # while the ranks end
    node.next_rendezvous()
    assert node.round.world == {"a": (0,)} and node.saved == "ckpt/step2"
    assert node.num_nodes_waiting() == 0
    note.write_text("ckpt/step3")
    assert node.num_nodes_waiting() == 1 and node.over == JOIN
    node.next_rendezvous()
    assert node.round.world == {"a": (0, 1)}
    node.lose([0])
    node.next_rendezvous()
    note.write_text("ckpt/step4")  # before the first look
    assert node.num_nodes_waiting() == 1 and node.over == JOIN
    node.set_closed()


def test_a_crash_loop_ends_with_the_first_error(tmp_path: Path, warm: Warm) -> None:
    job = Started(tmp_path, warm.python, "--num_gpus", "2", "--max_restarts", "1", mode="raises")
    status, text = job.finish()
    assert status == 1 and "given up after 1 restart(s) without a new checkpoint (--max_restarts 1)" in text
    assert len(list(job.out.glob("[0-9]*.1"))) == 2 and "deepspeed: rank 1 (pid" in text


def test_a_job_has_saved_as_soon_as_one_rank_has(tmp_path: Path, warm: Warm) -> None:
    """Another may have failed a moment before: it was too late, or its end went wrong."""
    job = Started(tmp_path, warm.python, "--num_gpus", "2")
    pid = job.round(0, 2)[1]
    job.end(0, 1, 128 + signal.SIGTERM)
    job.until(lambda: not Path(f"/proc/{pid}/cmdline").read_bytes(), "the end of rank 1")  # it stays a zombie
    job.end(0, 0, 200)
    status, text = job.finish()
    assert status == 200 and "a checkpoint was saved" in text and "starting again" not in text


class _EndsWhileLookedAt:
    """Ranks of which the last one fails right after the first look at them."""

    looks = kills = 0
    end = RankEnd(rank=0, pid=1, exitcode=1, ended_at=0.0)

    @property
    def all_ended(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def failures(self, *, ended_only: bool = False) -> list[RankEnd]:
        self.looks += 1
        return [self.end] if self.looks > 1 else []

    def kill_groups(self) -> None:
        self.kills += 1

    def reap(self) -> None:
        pass


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[NodeAgent]:
    made = NodeAgent.__new__(NodeAgent)
    made._scratch, made.guard, made.received = str(tmp_path), Guard([]), []
    made._ranks = _EndsWhileLookedAt()  # type: ignore[assignment]
    made._membership = types.SimpleNamespace(over="another", end_well=lambda: True)  # type: ignore[assignment]
    yield made
    made.guard.dismiss()


def test_a_last_rank_that_fails_is_no_good_end(agent: NodeAgent) -> None:
    group: Any = types.SimpleNamespace(workers=[])
    assert agent._monitor_workers(group).state == WorkerState.HEALTHY


def test_process_groups_of_ranks_that_have_ended_are_not_killed_again(agent: NodeAgent) -> None:
    ranks: Any = agent._ranks
    assert agent._end_ranks(0, 0.0) == [ranks.end] and agent._end_ranks(0, 0.0) == []
    assert ranks.kills == 1


@pytest.mark.in_make_test("saves-15-200", "-2-130")
@pytest.mark.parametrize(
    ("mode", "number", "expected"),
    [("saves", signal.SIGTERM, 200), ("saves", signal.SIGUSR1, 200), ("", signal.SIGINT, 128 + signal.SIGINT)],
)
def test_a_signal_to_the_command_ends_the_job_with_a_status_that_says_how(
    tmp_path: Path, warm: Warm, mode: str, number: int, expected: int
) -> None:
    job = Started(tmp_path, warm.python, "--num_gpus", "2", mode=mode)
    job.round(0, 2)
    job.process.send_signal(number)
    status, text = job.finish()
    assert status == expected, text
    if expected == 200:
        assert "a checkpoint was saved and all ranks have ended, as asked (status 200)" in text
    else:
        assert "SIGINT received; waiting up to 10 s for the ranks to end" in text
        assert "all ranks have been stopped after SIGINT" in text and "death signal" not in text


def test_a_command_that_is_killed_leaves_nothing(tmp_path: Path, warm: Warm) -> None:
    job = Started(tmp_path, warm.python, "--num_gpus", "2")
    job.round(0, 2)
    job.kill()


def test_a_command_that_is_killed_while_it_waits_for_nodes_leaves_nothing(tmp_path: Path, warm: Warm) -> None:
    flags = ("--min_elastic_nodes", "2", "--max_elastic_nodes", "2", "--node_rank", "1", "--num_gpus", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody else listens there either
        port = str(free.getsockname()[1])
        job = Started(tmp_path, warm.python, *flags, "--master_addr", "127.0.0.1", "--master_port", port)
        job.until(lambda: any(job.tmp.iterdir()), "a temporary folder")
        job.kill()
