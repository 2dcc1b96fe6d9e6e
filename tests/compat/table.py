"""A plugin that writes docs/compat.md from the tests that passed: ``pytest -p tests.compat.table tests/compat``.

A run of some files replaces their rows and keeps the others, each file with the date and the versions of its run.
"""

import datetime
import importlib.metadata
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compat.md"
TITLES = {  # by file, the longest beginning that fits; and the packages whose versions are shown
    "test_accelerate": ("Accelerate", ("accelerate", "transformers")),
    "test_client_examples": ("The examples, as commands", ("transformers", "accelerate", "peft", "lightning")),
    "test_examples": ("Scripts in the style of DeepSpeed's examples", ()),
    "test_hf": ("Transformers", ("transformers", "accelerate")),
    "test_hf_load": ("Transformers", ("transformers", "safetensors")),
    "test_hybrid_engine": ("Generation by the engine that trains", ("transformers", "peft")),
    "test_launched": ("Fresh processes of each launcher", ("transformers", "accelerate")),
    "test_lightning": ("Lightning", ("lightning",)),
    "test_peft": ("PEFT", ("peft", "transformers", "accelerate")),
    "test_quantized": ("Quantized bases", ("bitsandbytes", "torchao", "transformers", "peft")),
    "test_trl": ("TRL", ("trl", "transformers", "accelerate")),
    "test_weights_out": ("Weights out of engines", ("transformers", "peft")),
}
RANKS = (1, 2, 4)
HEAD = """\
# What was run with clients

Written by the tests that passed (`make compat-table`), and by nothing else. A cell names the ZeRO stages with which a
test ran on so many CPU ranks over gloo; *yes* where it has no stage. Most compare losses and weights with plain torch,
or with the client's own run without DeepSpeed; a row is named after its test. How to run them:
`tests/compat/README.md`; what to write in your script: [clients](clients.md).
"""


@dataclass
class Row:
    """One test function: the stages with which it passed, by number of ranks."""

    cells: dict[int, set[str]] = field(default_factory=dict)


def describe(item: Any) -> tuple[str, int, str]:
    """``file::function``, the most ranks that an item starts, and its stage, or an empty text."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    pools = [int(name[4:]) for name in item.fixturenames if re.fullmatch(r"pool\d", name)]
    ranks = params.get("world", params.get("ranks", max(pools, default=1)))
    stage = params.get("stage", "")
    return f"{Path(item.fspath).name}::{item.originalname}", int(ranks), str(stage)


def table(rows: dict[str, Row]) -> list[str]:
    """The rows of one file."""
    lines = ["| what | 1 rank | 2 ranks | 4 ranks |", "|---|---|---|---|"]
    for name, row in rows.items():
        cells = [row.cells.get(n) for n in RANKS]
        shown = [
            "" if stages is None else f"ZeRO {' '.join(sorted(stages - {''}))}" if stages - {""} else "yes"
            for stages in cells
        ]
        title = name.partition("::test_")[2].replace("_", " ")
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return lines


def sections(text: str) -> dict[str, str]:
    """The parts of a page by the file they are of."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {match[1]: part.strip() for part in parts if (match := re.search(r"tests/compat/(\w+)\.py", part))}


def versions(packages: tuple[str, ...]) -> str:
    """``name version`` of each package, torch last."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in (*packages, "torch"))


class Table:
    """Collects what passed; writes the page at the end of a run without failures."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Row]] = {}
        self.items: dict[str, tuple[str, int, str]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Notes what each item is."""
        self.items = {item.nodeid: describe(item) for item in items if "tests/compat/" in item.nodeid}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that passed is a cell."""
        if report.when == "call" and report.passed and report.nodeid in self.items:
            name, ranks, stage = self.items[report.nodeid]
            row = self.rows.setdefault(name.partition("::")[0], {}).setdefault(name, Row())
            row.cells.setdefault(ranks, set()).add(stage)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Nothing is written where a test failed, or only some of a file's were run."""
        if exitstatus == 0 and self.rows:
            kept = sections(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
            made = {Path(file).stem: self._section(file, rows) for file, rows in self.rows.items()}
            parts = {**kept, **made}
            ordered = sorted(parts, key=lambda stem: (title_of(stem)[0], stem))
            PAGE.write_text("\n".join([HEAD, *(f"{parts[stem]}\n" for stem in ordered)]), encoding="utf-8")

    @staticmethod
    def _section(file: str, rows: dict[str, Row]) -> str:
        title, packages = title_of(Path(file).stem)
        what = Path(file).stem.removeprefix("test_").replace("_", " ")
        day = datetime.datetime.now(tz=datetime.timezone.utc).date()
        head = [f"## {title}: {what}" if what.lower() != title.lower() else f"## {title}", ""]
        return "\n".join([*head, f"`tests/compat/{file}`, {day}: {versions(packages)}.", "", *table(rows)])


def title_of(stem: str) -> tuple[str, tuple[str, ...]]:
    """The client of a test file, and its packages."""
    return TITLES[max((name for name in TITLES if stem.startswith(name)), key=len)]


def pytest_configure(config: pytest.Config) -> None:
    """Registered by ``-p tests.compat.table``; a run of single tests would write a part of a file's rows."""
    if config.getoption("keyword") or config.getoption("markexpr") or any("::" in arg for arg in config.args):
        raise pytest.UsageError("tests.compat.table writes the rows of whole files: give files, and neither -k nor -m")
    config.pluginmanager.register(Table(), "compat-table")
