"""A save that dies at any instant leaves a whole checkpoint to resume from, says what it skipped, and the next save
tidies up.
"""

import functools
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed.checkpoint.format import folders
from deepspeed.tools.verify.cli import main
from deepspeed.tools.verify.crash import Message, SavingJob, Witness, live
from deepspeed.tools.verify.driver import Finding

pytestmark = pytest.mark.timeout(240)
RANKS = 2

# Where the first rank dies in its second save: the function, what its arguments match, before or after it has done its
# work; then the step that a resume must find.
POINTS: dict[str, tuple[str, str, str, int]] = {
    "before the manifest": ("write_atomically", r"manifest\.json", "before", 1),
    "after the manifest": ("write_atomically", r"manifest\.json", "after", 1),
    "before it has its name": ("rename", r"\.saving-\S+ \S+/step\d", "before", 1),
    "after it has its name": ("rename", r"\.saving-\S+ \S+/step\d", "after", 1),
    "before latest names it": ("replace", r"/latest$", "before", 1),
    "after latest names it": ("replace", r"/latest$", "after", 2),
    "before the old one is removed": ("rename", r"/step\d \S+\.removed-", "before", 2),
    "when the old one has lost its name": ("rename", r"/step\d \S+\.removed-", "after", 2),
}
# The same tag again and again: the new one takes the old one's place in one step ...
EXCHANGE: dict[str, tuple[str, str, str, int]] = {
    "before the exchange": ("_swap", r"/newest$", "before", 1),
    "after the exchange": ("_swap", r"/newest$", "after", 2),
    "before the exchanged one is thrown away": ("discard", r"/\.newest\.saving-[^/]*$", "before", 2),
    "before the files of the old one go": ("rmtree", r"/\.newest\.saving-[^/]*$", "before", 2),
}
# ... or in two, where the filesystem has no such step.
RENAMES: dict[str, tuple[str, str, str, int]] = {
    "before the first rename": ("rename", r"newest \S+\.replaced-", "before", 1),
    "between the two renames": ("rename", r"newest \S+\.replaced-", "after", 1),
    "after the second rename": ("rename", r"\.saving-\S+ \S+/newest", "after", 2),
    "before the old one is thrown away": ("discard", r"newest\.replaced-", "before", 2),
    "when the old one has lost that name too": ("rmtree", r"newest\.replaced-\S+\.removed-", "before", 2),
}


def dying(real: Callable[..., Any], pattern: str, when: str, nth: int) -> Callable[..., Any]:
    """``real``, but the process dies at its ``nth`` call with such arguments."""
    seen: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        hit = re.search(pattern, " ".join(str(a) for a in args if not isinstance(a, bytes))) is not None
        seen.extend([1] if hit else [])
        if hit and len(seen) == nth and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if hit and len(seen) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


def arm(point: tuple[str, str, str, int], nth: int, rank: int) -> None:
    """Make the first rank die there."""
    if rank == 0:
        if point in RENAMES.values():
            folders._swap = lambda *_: False
        name, pattern, when, _ = point
        owner: Any = folders if hasattr(folders, name) else folders.shutil if name == "rmtree" else os
        setattr(owner, name, dying(getattr(owner, name), pattern, when, nth))


def crash_and_resume(job: SavingJob, point: tuple[str, str, str, int], *, nth: int = 2) -> None:
    witness = Witness(Path(job.folder), job.background)
    told = live(replace(job, trap=functools.partial(arm, point, nth)), witness)
    steps = [m[1] for m in told if m[0] == "saving"]
    assert steps == [1, 2] or job.background and steps == [1, 2, 3]  # training goes on until the thread comes there
    left = {p.name for p in Path(job.folder).iterdir() if p.name.startswith(".")}
    again = live(replace(job, saves=1), witness)
    assert again[0][:2] == ("loaded", point[3])
    still = left.intersection(p.name for p in Path(job.folder).iterdir())  # the next save itself may be under way
    assert not still, still


@pytest.mark.in_make_test("after the manifest", "after it has its name", "when the old one has lost its name")
@pytest.mark.parametrize("where", POINTS)
def test_killed_at_a_turning_point_of_a_save(where: str, tmp_path: Path) -> None:
    # Pruning finds its first victim in the second save.
    crash_and_resume(SavingJob(str(tmp_path), RANKS, keep_last=1), POINTS[where], nth=1 if "old one" in where else 2)


@pytest.mark.in_make_test("before latest names it")
@pytest.mark.parametrize("where", ["after the manifest", "before latest names it"])
def test_killed_at_a_turning_point_of_a_background_save(where: str, tmp_path: Path) -> None:
    crash_and_resume(SavingJob(str(tmp_path), RANKS, background=True), POINTS[where])


@pytest.mark.in_make_test(
    "after the exchange",
    "before the files of the old one go",
    "between the two renames",
    "before the old one is thrown away",
)
@pytest.mark.parametrize("where", [*EXCHANGE, *RENAMES])
def test_killed_while_a_tag_is_overwritten(where: str, tmp_path: Path) -> None:
    point = {**EXCHANGE, **RENAMES}[where]
    crash_and_resume(SavingJob(str(tmp_path), 1, tag="newest"), point, nth=2 if "second" in where else 1)


@pytest.mark.exhaustive
def test_killed_at_random_instants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crash", "--kills", "6", "--folder", str(tmp_path), "--seed", "5"]) == 0
    told = capsys.readouterr().out
    assert re.search(
        r"^6 kills: every resume found a whole checkpoint; \d+ unfinished saves skipped$", told, re.MULTILINE
    ), told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (("loaded", 2, "state", "/d/step2", []), "had ended"),
        (("loaded", 3, "other", "/d/step3", []), "gave rank 0 the state other"),
        (("loaded", 3, "state", "/d/step2", []), "latest names step3"),
        (("loaded", 3, "state", None, []), "loaded nothing"),
        (("loaded", 3, "state", "/d/step3", ["nothing"]), "does not name .t.saving-x"),
        (("saving", 3, "other"), "another state after the resume"),
        (("saved", 4, 0.1), "left .t.saving-x behind"),
    ],
)
def test_the_gate_notices_a_wrong_resume(message: Message, words: str, tmp_path: Path) -> None:
    (tmp_path / ".t.saving-x").mkdir()
    witness = Witness(tmp_path, digests={(3, 0): "state"}, ended=3, left=[".t.saving-x"], expected="step3")
    with pytest.raises(Finding, match=words):
        witness.hear(0, message)


def test_what_a_dead_process_left_goes_even_when_its_number_lives_again(tmp_path: Path) -> None:
    mine = folders.begin(tmp_path, "t")
    host, _, began, _ = mine.name.removeprefix(".t.saving-").rsplit("-", 3)
    left = [
        tmp_path / f".t.saving-{host}-{os.getpid()}-{int(began) + 1}-abc",
        tmp_path / f".latest.saving-{host}-{os.getpid()}-1-abc",
    ]
    left[0].mkdir()
    left[1].write_text("half")
    folders.begin(tmp_path, "u")
    assert mine.exists() and not any(p.exists() for p in left)
