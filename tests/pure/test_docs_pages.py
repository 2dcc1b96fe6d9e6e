"""The pages: every command and option in them exists, every configuration passes the checker, every link leads
somewhere, and the list of error messages lacks none that the package raises.
"""

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed.config import load_config
from deepspeed.config.model.values import BATCH_KEYS
from deepspeed.config.parse import plain_json
from deepspeed.errors import UsageError
from tests.budget.test_needs import LATER as NOT_YET, SCRIPTS, _help
from tests.harness.rows import for_each

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
LATER = {("needs.md", name) for name in NOT_YET}  # tests/budget/test_needs.py sees that they are not there
TOPICS = ("ds_verify", "ds_bench", "ds_checkpoint", "ds_config")


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each fenced block; those that are indented by four have the language "indented"."""
    for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2]
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for match in re.finditer(r"(?:^\n)((?:^    [^\n]*\n)+)", plain, re.MULTILINE):
        yield "indented", re.sub(r"^    ", "", match[1], flags=re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """Page and line of each command of this package in a block, and in running text between backticks."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [
            line
            for language, body in blocks(text)
            if language in ("indented", "bash", "")
            for line in re.sub(r"\\\n\s*", " ", body).splitlines()
        ]
        lines += re.findall(r"`((?:ds_\w+|deepspeed) [^`\n]+)`", text)
        found += [(page.name, line) for line in lines if line.strip() and line.split()[0] in SCRIPTS]
    return found


def _options(line: str) -> tuple[list[str], set[str]]:
    """Program with its topic, and the options of a command line before the script that it starts."""
    words = shlex.split(re.split(r"\s{2,}#|\s{3,}", line)[0].replace("'", ""), comments=False)
    program, *rest = words
    if program == "deepspeed":
        script = (i for i, word in enumerate(rest) if word.endswith(".py") or word in ("...", "--no_python"))
        ends = next(script, len(rest))
        return [program], {word.partition("=")[0] for word in rest[:ends] if word.startswith("-")}
    topic = rest[:1] if program in TOPICS and rest and re.fullmatch(r"[a-z0-9-]+", rest[0]) else []
    topic = ["run"] if program == "ds_report" and rest[:1] == ["run"] else topic
    return [program, *topic], {word.partition("=")[0] for word in rest if re.match(r"--\w", word)}


def test_commands_have_the_options_that_pages_give_them() -> None:
    wrong, found = [], commands()
    for page, line in found:
        if (page, line) not in LATER:
            words, options = _options(line)
            status, text = _help(*words)
            missing = [option for option in options if not re.search(rf"{option}\b", text)]
            if status != 0 or missing:
                wrong.append((page, line, missing))
    assert len(found) > 80 and not wrong


def _configurations() -> Iterator[tuple[str, str]]:
    """Page and text of each configuration, whole or a part of one; several in a block stand on lines of their own."""
    for page in PAGES:
        for language, body in blocks(page.read_text()):
            if language == "json" or (language in ("", "indented") and re.match(r'\s*(\{|"\w+":)', body)):
                text = re.sub(r"    (#|//).*$", "", body, flags=re.MULTILINE)
                if page.name != "checkpoint-format.md":  # shows records of that format
                    parts = [text] if _parsed(text) else re.findall(r'^[{"].*', text, re.MULTILINE)
                    yield from ((page.name, part) for part in parts)


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return json.loads(plain_json(text if text.lstrip().startswith("{") else f"{{{text}}}"))
    except ValueError:
        return None


@for_each(("page", "text"), [*_configurations()])
def test_configurations_in_pages_pass_the_checker(page: str, text: str) -> None:
    config = _parsed(text)
    assert config is not None
    if "elasticity" not in config and not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(config):
        config["train_micro_batch_size_per_gpu"] = 1
    # What a client of ours fills in, checked as it is filled in.
    numbers = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0, "betas": [0.9, 0.999]}
    if "optimizer" in config:
        params = config["optimizer"]["params"]
        config["optimizer"]["params"] = {k: numbers[k] if v == "auto" else v for k, v in params.items()}
    for key in BATCH_KEYS:
        config |= {key: 2} if config.get(key) == "auto" else {}
    load_config(config, world_size=8)


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@for_each("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:", target):
            file, _, anchor = target.partition("#")
            there = (page.parent / file) if file else page
            if not there.exists() or (anchor and anchor not in _anchors(there)):
                wrong.append(target)
    assert not wrong


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w-]+\.md)$", (DOCS / "site" / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {page.name for page in DOCS.glob("*.md")}


# --- the list of error messages ---


with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(DOCS / "site"))
    errors = importlib.import_module("errors")


def _literals(node: ast.AST) -> list[str]:
    """Pieces of text below a node that are long enough to be of a sentence; not those of values that are computed."""
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Call):
        return []
    if isinstance(node, ast.Constant):
        return [node.value.strip()] if isinstance(node.value, str) and len(node.value.split()) > 2 else []
    return [piece for child in ast.iter_child_nodes(node) for piece in _literals(child)]


def test_no_sentence_of_a_raise_is_missing() -> None:
    """Each piece of text that stands in a raise statement is in an entry of that line."""
    listed: dict[tuple[str, int], str] = {}
    for message in errors.messages():
        key = (message.module, message.line)
        listed[key] = f"{listed.get(key, '')}\n{message.text}"
    missing, seen = [], 0
    for path in sorted((ROOT / "deepspeed").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "deepspeed").with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                for piece in _literals(node.exc):
                    seen += 1
                    if piece not in listed.get((module, node.lineno), ""):
                        missing.append((module, node.lineno, piece))
    assert seen > 700 and not missing


def test_errors_that_a_user_meets_are_in_the_list() -> None:
    """Sentences as they come out of the package match an entry, values included."""
    met = []
    for config in (
        {"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
        {},
    ):
        with pytest.raises(ValueError) as caught:
            load_config(config, world_size=2)
        met.append(str(caught.value))
    with pytest.raises(UsageError) as wrong:
        importlib.import_module("deepspeed.engine.initialize").initialize(model=None)
    met.append(str(wrong.value))
    parts = [[re.escape(p) for p in re.split(r"\{[^{}]*\}", m.text) if p.strip()] for m in errors.messages()]
    patterns = [pattern for pattern in map(".*".join, parts) if len(pattern) > 15]
    assert not [text for text in met if not any(re.search(p, text, re.DOTALL) for p in patterns)]


def test_the_page_lists_every_message_and_class() -> None:
    text = errors.page()
    listed = {(m.module, m.kind, re.sub(r"\s+", " ", m.text).strip()) for m in errors.messages()}
    assert text.count("\n- `") >= len(listed) > 700
    assert "already belongs to a living engine" in text  # a sentence that comes from a variable
    assert all(f"| `{name}` |" in text for name in errors.classes())
    assert all((DOCS / where.partition("#")[0]).is_file() for where in errors.PAGES.values())
