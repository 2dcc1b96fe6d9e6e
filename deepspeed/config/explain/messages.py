"""Turning everything that can be wrong with a configuration into sentences."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from deepspeed.config.explain.lines import line_of
from deepspeed.config.model.values import AUTO
from deepspeed.config.parse import ConfigSource
from deepspeed.errors import DeepSpeedConfigError

_LISTABLE = 12


def nearest(key: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name most similar to ``key``, or None when nothing resembles it."""
    close = difflib.get_close_matches(key, list(names), n=1, cutoff=cutoff)
    return close[0] if close else None


def unknown_key(path: str, names: Iterable[str]) -> str:
    """Sentence for a key that does not exist, with the nearest valid one."""
    valid = sorted(set(names))
    guess = nearest(path.rpartition(".")[2], valid)
    if guess is not None:
        return f"{path}: unknown key, did you mean {guess!r}?"
    return (
        f"{path}: unknown key. Valid here: {', '.join(valid)}."
        if len(valid) <= _LISTABLE
        else f"{path}: unknown key. Delete it."
    )


def at_line(source: ConfigSource, path: str, sentence: str) -> str:
    """``sentence`` with the line of ``path`` when the configuration came from a text with lines."""
    line = line_of(source.lines, path)
    return sentence if line is None else f"{sentence} (line {line})"


def fail(source: ConfigSource, problems: list[str]) -> None:
    """Raise DeepSpeedConfigError with all ``problems``; do nothing when there are none."""
    if not problems:
        return
    listed = f" has {len(problems)} problems:" + "".join(f"\n  - {item}" for item in problems)
    error = DeepSpeedConfigError(source.name + (listed if len(problems) > 1 else f": {problems[0]}"))
    error.faults = tuple(problems)
    raise error


def written_path(path: str, renames: Mapping[str, str]) -> str:
    """The dotted path as the user wrote it, given {canonical prefix: written prefix}."""
    prefix = path
    while prefix:
        if prefix in renames:
            return renames[prefix] + path[len(prefix) :]
        prefix = prefix.rpartition(".")[0]
    return path


def _block_inside(annotation: Any) -> tuple[type[BaseModel] | None, int]:
    """The block that a field holds, and how many list positions or free keys stand before it."""
    if isinstance(annotation, type) and not get_args(annotation):
        return (annotation, 0) if issubclass(annotation, BaseModel) else (None, 0)
    deeper = get_origin(annotation) in (tuple, list, dict, Mapping)
    for item in get_args(annotation):
        block, depth = _block_inside(item)
        if block is not None:
            return block, depth + deeper
    return None, 0


def block_model(root: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel] | None:
    """The model class that describes the block at ``loc`` below ``root``, or None when there is none."""
    model, at = root, 0
    while at < len(loc):
        info = model.model_fields.get(str(loc[at]))
        block, depth = (None, 0) if info is None else _block_inside(info.annotation)
        if block is None:
            return None
        model, at = block, at + 1 + depth
    return model if at == len(loc) else None


def _wrong_value(kind: str, message: str, value: Any) -> str:
    if value == AUTO and isinstance(value, str):
        return (
            'is still "auto". Only an integration (Transformers, Accelerate) fills that in; write a value or '
            "delete the key"
        )
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind in ("bool_type", "bool_parsing"):
        return f"must be true or false, not {value!r}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"must be a block {{...}}, not {value!r}"
    if kind == "invalid_key":
        return f"has the key {value!r}, which is not a text"
    if kind in ("tuple_type", "list_type"):
        return f"must be a list [...], not {value!r}"
    if kind == "string_type":
        return f"must be a text, not {value!r}"
    if kind == "missing":
        return "is required in this block"
    shown = message.removeprefix("Input should be ").rstrip(".")
    return f"must be {shown}, not {value!r}"


def explain_validation(
    error: ValidationError,
    root: type[BaseModel],
    *,
    source: ConfigSource,
    renames: Mapping[str, str],
    aliases: Mapping[str, Iterable[str]],
) -> list[str]:
    """One sentence per fault of a pydantic error: dotted path, what is wrong, nearest key, line.

    ``renames`` maps canonical to written paths; ``aliases`` maps a canonical block path to extra valid key names.
    """
    sentences: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        loc, kind = tuple(fault["loc"]), fault["type"]
        if "[key]" in loc or kind == "invalid_key":
            loc, kind = loc[: -1 if kind == "invalid_key" else -2], "invalid_key"
        # The members of a union each report their own fault below a made-up path segment.
        while len(loc) > 1 and (block := block_model(root, loc[:-1])) is None and kind != "extra_forbidden":
            loc = loc[:-1]
        path = written_path(".".join(map(str, loc)), renames)
        if kind == "extra_forbidden":
            block = block_model(root, loc[:-1])
            names = [*(block.model_fields if block else ()), *aliases.get(".".join(map(str, loc[:-1])), ())]
            sentence = unknown_key(path, names)
        else:
            sentence = f"{path} {_wrong_value(kind, fault['msg'], fault['input'])}."
        sentences.setdefault(path, at_line(source, path, sentence))
    return list(sentences.values())
