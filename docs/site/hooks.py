"""What MkDocs does beside reading the pages: generated parts, and links to files that are no pages."""

import contextlib
import importlib
import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
import api  # noqa: E402 - this folder is no package, its files are found by the line above
from errors import page  # noqa: E402

SCRIPTS = re.findall(r'^"?([\w.]+)"? = "(deepspeed\S+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
ALIASES = ("deepspeed.pt", "ds", "dsr")


# An __all__ that is made of other lists is no fault of a page.
logging.getLogger("mkdocs.plugins.griffe").addFilter(lambda record: "__all__" not in record.getMessage())


def commands() -> str:
    """What each command prints for --help, and each of its topics."""
    parts = []
    for name, place in sorted(SCRIPTS):
        if name not in ALIASES:
            text = _help(place)
            parts.append(f"### `{name}`\n\n```text\n{text}```\n")
            topics = re.search(r"\{([a-z0-9,-]+)\}", text) if name != "deepspeed" else None
            for topic in topics[1].split(",") if topics else ():
                parts.append(f"#### `{name} {topic}`\n\n```text\n{_help(place, topic)}```\n")
    return "\n".join(parts)


def _help(place: str, *words: str) -> str:
    module, _, function = place.partition(":")
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        getattr(importlib.import_module(module), function)([*words, "--help"])
    return re.sub(r"usage: \S+", lambda m: m[0].replace("__main__.py", "deepspeed"), shown.getvalue())


def on_config(config: Any) -> Any:
    """The version behind the site's name."""
    version = re.search(r'__version__ = "(.+)"', (ROOT / "deepspeed" / "version.py").read_text())
    config["site_name"] = f"{config['site_name']} {version[1] if version else ''}".strip()
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Generated parts in the place of their markers; files outside docs/ by their path: the site has no such page."""
    made = {"errors": lambda: page().replace("## ", "### "), "commands": commands, "answers": api.answers}
    made |= {"communication": api.communication, "optimizers": api.optimizers}
    markdown = api.expanded(markdown)
    for name, make in made.items():
        before, marker, behind = markdown.partition(f"<!-- generated: {name} -->")
        if marker:  # the paragraph behind it says what stands here
            markdown = before + make() + behind.lstrip("\n").partition("\n\n")[2]
    return re.sub(r"\[([^]]*)\]\(\.\./([^)]*)\)", r"`\2`", markdown)
