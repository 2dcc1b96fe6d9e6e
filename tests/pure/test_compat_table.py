"""docs/compat.md names tests that exist, and its plugin writes what passed and nothing else."""

import re
from pathlib import Path

import pytest

from tests.compat import table

ROOT = Path(__file__).parents[2]


def test_every_row_is_a_test_that_exists_and_every_section_has_versions() -> None:
    parts = table.sections(table.PAGE.read_text())
    assert len(parts) > 8
    for stem, part in parts.items():
        source = (ROOT / "tests" / "compat" / f"{stem}.py").read_text()
        assert re.search(r", \d{4}-\d\d-\d\d: .*torch \d", part), stem
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
        assert rows and not [row[0] for row in rows if f"def test_{row[0].replace(' ', '_')}(" not in source]
        assert all(any(re.match(r"yes|ZeRO [0-3]", cell.strip(" |")) for cell in row[1:]) for row in rows)


RUN = """
import pytest

@pytest.fixture
def pool2():
    return None

@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_that_passes(world, stage, request):
    if stage == 0 and world == 2:
        pytest.skip("not this one")

def test_on_two(pool2):
    pass

def test_left_out():
    pytest.skip("no client")
"""


def test_the_plugin_writes_what_passed_and_keeps_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tests" / "compat"
    folder.mkdir(parents=True)
    (folder / "test_hf_made.py").write_text(RUN)
    page = tmp_path / "compat.md"
    kept = "## TRL\n\n`tests/compat/test_trl.py`, 2026-01-01: torch 2.0.\n\n| a | b |\n"
    page.write_text(f"# Title\n\n{kept}")
    monkeypatch.setattr(table, "PAGE", page)
    monkeypatch.setattr(table, "versions", lambda packages: ", ".join((*packages, "torch 1")))
    plugin = table.Table()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]  # which collects garbage
    options += ["--rootdir", str(tmp_path), "-c", "/dev/null", str(folder)]
    assert pytest.main(options, plugins=[plugin]) == 0
    text = page.read_text()
    assert "| that passes | ZeRO 0 3 | ZeRO 3 |  |" in text and "| on two |  | yes |  |" in text
    assert "left out" not in text and kept.strip() in text
    (folder / "test_hf_wrong.py").write_text("def test_that_fails():\n    assert False\n")
    assert pytest.main(options, plugins=[table.Table()]) == 1
    assert page.read_text() == text


def test_every_file_of_clients_has_a_title() -> None:
    files = [path.stem for path in Path(table.__file__).parent.glob("test_*.py")]
    assert files and not [file for file in files if not table.title_of(file)[0]]
