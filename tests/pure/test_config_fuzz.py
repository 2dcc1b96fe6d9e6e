"""Whatever is near a valid configuration is either refused in a sentence or means exactly what it says."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from deepspeed.config import DeepSpeedConfigError, load_config
from deepspeed.config.model.root import TOP_LEVEL_KEYS, DeepSpeedConfig
from deepspeed.config.model.settings import Setting, all_keys, settings as flat
from deepspeed.config.model.spelling import LEGACY_OFFLOAD, REMOVED_KEYS, ZERO_ALIASES
from deepspeed.config.model.values import DTYPE_NAMES
from deepspeed.config.parse import parse_text
from deepspeed.errors import nearest_hint
from deepspeed.monitor.log import logger

KEYS = all_keys(DeepSpeedConfig)
DOCUMENTED = json.loads((Path(__file__).parents[1] / "data" / "config_keys.json").read_text())
PLAIN = [entry for entry in DOCUMENTED if entry["status"] == "current" and not set("<[") & set(entry["path"])]
WORDS = ["adam", "AdamW", "WarmupLR", "cpu", "none", "nvme", "fp16", "bf16", "/tmp/x", "mean", "auto"]
NUMBERS = [-1, 0, 1.5, math.nan, math.inf, -1e300, 10**30]
OTHERS = [None, "auto", "8", "true", [], {}, [1, "x"], {"enabled": True}, True]
JUNK = st.one_of(st.sampled_from([*NUMBERS, *OTHERS]), st.text(max_size=6))


def well_typed(entry: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of the documented type; the range is left to chance."""
    kinds = {
        "bool": st.booleans(),
        "int": st.one_of(st.integers(0, 4), st.sampled_from([8, 1000, 5e8, 10**12])),
        "float": st.sampled_from([0.0, 0.5, 0.9, 1.0, 2.0, 1e-8, 1]),
        "null": st.none(),
        "enum": st.sampled_from(entry.get("allowed") or [None]),
        "string": st.sampled_from(WORDS),
        "path": st.sampled_from(["/tmp/x", "out"]),
        "false": st.just(value=False),
    }
    parts = [kinds.get(kind) for kind in entry["type"].split("|")]
    known = [part for part in parts if part is not None]
    return st.one_of(*known, st.just(entry["default"])) if known else JUNK


def misspelt(name: str, position: int, kind: int) -> str:
    """``name`` with one character lost, doubled, replaced or swapped."""
    at = position % len(name)
    return (
        name[:at] + name[at + 1 :],
        name[: at + 1] + name[at:],
        name[:at] + "1" + name[at + 1 :],
        name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
    )[kind]


def entries(candidates: list[dict[str, Any]]) -> st.SearchStrategy[tuple[str, Any, tuple[int, int] | None]]:
    """(path, value, misspelling): one value in ten is junk, one name in ten is misspelt."""
    return st.sampled_from(candidates).flatmap(
        lambda entry: st.tuples(
            st.just(entry["path"]),
            st.integers(0, 9).flatmap(lambda dice: JUNK if dice == 9 else well_typed(entry)),
            st.integers(0, 9).flatmap(
                lambda dice: st.tuples(st.integers(0, 30), st.integers(0, 3)) if dice == 9 else st.none()
            ),
        )
    )


ANY = entries(PLAIN)
# Keys of one group are the ones with something to say about each other.
NAMES = sorted({entry["group"] for entry in PLAIN})
GROUPS = st.sampled_from([entries([entry for entry in PLAIN if entry["group"] == name]) for name in NAMES])
SIZES = st.sampled_from([{"train_batch_size": 8}, {"train_micro_batch_size_per_gpu": 2}, {"train_batch_size": 8.0}, {}])


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A few documented keys, mostly with sensible values, some misspelt."""
    out: dict[str, Any] = dict(draw(SIZES))
    if draw(st.booleans()):
        out["zero_optimization"] = {"stage": draw(st.integers(0, 3))}
    related = draw(st.lists(draw(GROUPS), max_size=5))
    for path, value, typo in [*related, *draw(st.lists(ANY, max_size=2))]:
        *parents, name = path.split(".")
        block = out
        for parent in parents:
            inner = block.setdefault(parent, {})
            if not isinstance(inner, dict):
                break
            block = inner
        else:
            block[misspelt(name, *typo) if typo else name] = value
    return out


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in a document that is no block."""
    for key, item in value.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(item, dict):
            yield from leaves(item, inner)
        else:
            yield inner, item


def canonical(path: str) -> str:
    head, _, tail = path.partition(".")
    if head == "bfloat16":
        return f"bf16.{tail}"
    if head == "zero_optimization":
        return f"{head}.{ZERO_ALIASES.get(tail, tail)}"
    return path


def same(written: Any, effective: Any) -> bool:
    """Whether the parsed value is the written one, apart from the spellings the format allows."""
    effective = getattr(effective, "value", effective)
    if isinstance(written, list):
        return (
            isinstance(effective, tuple | list)
            and len(written) == len(effective)
            and all(map(same, written, effective))
        )
    if isinstance(effective, tuple):
        return len(effective) == 1 and same(written, effective[0])
    if isinstance(written, str) and isinstance(effective, str):
        return written.lower() == effective.lower() or written.lower() in DTYPE_NAMES.get(effective, ())
    if isinstance(effective, bool) and type(written) is int:
        return written == effective  # 0 and 1
    if isinstance(written, bool) or isinstance(effective, bool):
        return written is effective
    if isinstance(effective, float) and isinstance(written, int):
        return float(written) == effective
    return bool(written == effective) or str(written).lower() in ("inf", "infinity") and effective == math.inf


def excused(path: str, value: Any, document: dict[str, Any], found: dict[str, Setting]) -> bool:
    """Whether the format itself says that this leaf has no value of its own."""
    head = path.partition(".")[0]
    name = path.rpartition(".")[2]
    if value is None or value == "auto" or value == []:
        return True  # absent, by the rules of the format
    if path in REMOVED_KEYS or head in REMOVED_KEYS or name in LEGACY_OFFLOAD or name == "cpu_offload_use_pin_memory":
        return True  # says "off", or is a spelling of another key (checked in test_config_keys)
    if head in ("allgather_size", "$schema") or path == "zero_optimization":
        return True
    if head == "bfloat16" and "bf16" in document:
        return True  # bf16 wins, as documented
    if head not in TOP_LEVEL_KEYS:
        return not nearest_hint(head, TOP_LEVEL_KEYS, 0.8) or "." in head  # a program's own key; warned about
    if path.startswith("zero_optimization.offload_") and found.get(".".join(path.split(".")[:2])) is not None:
        return found[".".join(path.split(".")[:2])].value is None  # device "none"
    if head in ("optimizer", "scheduler") and found.get(head) is not None:
        return found[head].value is None  # a block without a name is no block
    return path in KEYS and path in ("aio.thread_count", "zero_optimization.grad_hooks")


def assert_means_what_it_says(config: DeepSpeedConfig, document: dict[str, Any]) -> None:
    found = {item.path: item for item in flat(config)}
    for path, value in leaves(document):
        if excused(path, value, document, found):
            continue
        setting = found.get(canonical(path))
        assert setting is not None, f"{path} = {value!r} was accepted and is nowhere"
        assert same(value, setting.value), f"{path} = {value!r} was accepted, but {setting.value!r} is in effect"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    level = logger.level
    logger.setLevel("CRITICAL")
    yield
    logger.setLevel(level)


RELAXED = settings(database=None, suppress_health_check=list(HealthCheck))


@RELAXED
@given(document=documents(), world_size=st.sampled_from([1, 2, 4]), checked=st.booleans())
def test_documents_near_valid_ones(document: dict[str, Any], world_size: int, *, checked: bool) -> None:
    try:
        config = load_config(document, world_size=world_size, check_support=checked)
    except DeepSpeedConfigError as error:
        assert str(error) and "Traceback" not in str(error) and "pydantic" not in str(error)
    else:
        assert_means_what_it_says(config, document)


@RELAXED
@given(
    document=documents(),
    cut=st.one_of(st.none(), st.integers(0, 300)),
    flip=st.one_of(st.none(), st.tuples(st.integers(0, 300), st.characters(codec="utf-8"))),
)
def test_texts_near_valid_ones(
    document: dict[str, Any], cut: int | None, flip: tuple[int, str] | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = json.dumps(document, indent=1)
    text = text if cut is None else text[:cut]
    text = text if flip is None else text[: flip[0]] + flip[1] + text[flip[0] + 1 :]
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_text(text)
    try:
        config = load_config(path, world_size=2, check_support=False)
    except DeepSpeedConfigError as error:
        assert "fuzz.json" in str(error) and "Traceback" not in str(error)
    else:
        assert_means_what_it_says(config, parse_text(text, "text"))
