"""The keys that no code reads: those of features that this release does not have, and those without effect in it.

They are data, ``unread.json``: block -> key -> [type, default, meaning, further facts of ``Key``]. The row "" is about
the block: ``holder`` says where it stands when it is not simply a block ("class": it goes on in a class in Python),
``switch`` on which key the others hang, and ``auto`` that "auto" is as good as absent.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NewType

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import InitErrorDetails

from deepspeed.config.explain.messages import RESEMBLES, nearest
from deepspeed.config.model.values import (
    AutoBlock,
    AutoOrInt,
    Block,
    Count,
    DtypeName,
    DtypeText,
    Flag,
    FrozenDict,
    Int,
    Names,
    Num,
    PathText,
    Text,
    UpperCase,
    auto_or_number,
    dtype_name,
    freeze,
    inert,
    not_yet,
)


def _from_a_program(value: Any) -> Any:
    if isinstance(value, str | bytes | int | float | list | tuple | dict):
        raise ValueError(f"is an object that only a program can pass, not {value!r}; delete it")
    return value


metric = NewType("metric", str)  # a name of the user's choice: "<metric>" in paths
_TYPES: Mapping[str, Any] = MappingProxyType(
    {
        "bool": Flag,
        "int": Int,
        "float": Num,
        "text": PathText,
        "names": Names,
        "dtype": Annotated[DtypeName, BeforeValidator(dtype_name, json_schema_input_type=DtypeText)],
        "auto or int": AutoOrInt,
        "auto or float": Annotated[Literal["auto"] | Num, BeforeValidator(auto_or_number)],
        "list": Annotated[tuple[Any, ...], BeforeValidator(freeze)],
        "list of int": tuple[Count, ...],
        "block of text": Annotated[dict[str, Text], AfterValidator(freeze)],
        "block": Annotated[dict[str, Any], AfterValidator(freeze)],
        "object": Annotated[Any, BeforeValidator(_from_a_program)],
        "null": type(None),
    }
)
_SIGNS = MappingProxyType({">=": "ge", ">": "gt", "<=": "le", "<": "lt"})


class OpenBlock(Block):
    """A block in which a client may keep keys of its own; those that look like a misspelt one are refused."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _own_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        foreign = {name: item for name, item in value.items() if name not in cls.model_fields}
        misspelt = [name for name in foreign if nearest(str(name), cls.model_fields, RESEMBLES) is not None]
        if misspelt:
            faults = [
                InitErrorDetails(type="extra_forbidden", loc=(str(name),), input=foreign[name]) for name in misspelt
            ]
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return value | {name: freeze(item) for name, item in foreign.items()}


def _type(words: str | list[Any], default: Any) -> Any:
    """The annotation that a row's first cell stands for: a list of choices, a list of such a list, or words."""
    if isinstance(words, list) and isinstance(words[0], list):
        choice: Any = Literal[tuple(words[0])]
        kind: Any = tuple[choice, ...]
    elif isinstance(words, list):
        kind = Annotated[Literal[tuple(words)], UpperCase if words[0].isupper() else Field()]
    else:
        name, *bounds = re.split(r" (?=[<>])", words)
        limits = {_SIGNS[sign]: json.loads(number) for sign, number in map(str.split, bounds)}
        kind = Annotated[_TYPES[name], Field(**limits)] if limits else _TYPES[name]
    return kind | None if default is None and words != "object" else kind


def _block(path: str, rows: Mapping[str, Any], gate: str = "") -> type[Block]:
    """The model of one block, or the base of the class that has its other keys; ``gate`` is the switch around it."""
    facts, fields = rows[""], dict[str, Any]()
    switch = f"{path}.{facts['switch']}" if "switch" in facts else gate
    for name, row in rows.items():
        place = f"{path}.{name}".lstrip(".")
        if isinstance(row, dict) and name:
            field = _inner(place, row, switch)
            fields |= {name: field} if row[""].get("holder") != "class" else {}
        elif name:
            words, default, meaning, *more = row
            further = {"gate": gate if switch == place else switch, **(more[0] if more else {})}
            absent = ... if default == "required" else freeze(default)
            fields[name] = (_type(words, default), _field(absent, meaning, facts, further))
    base = OpenBlock if "own keys" in facts else AutoBlock if "auto" in facts else Block
    name = "".join(part.title().replace("_", "") for part in path.split(".")) + "Keys"
    model: type[Block] = create_model(name, __base__=base, __module__=__name__, __doc__=facts.get("about"), **fields)
    _MODELS[path] = model
    return model


def _field(default: Any, meaning: str, block: Mapping[str, Any], further: dict[str, Any]) -> Any:
    """Why a key is inert stands in its own row, or in that of its block."""
    note = further.pop("inert", None if "note" in further else block.get("inert"))
    return not_yet(default, meaning, **further) if note is None else inert(default, meaning, note)


def _inner(path: str, rows: Mapping[str, Any], gate: str) -> tuple[Any, Any]:
    """Annotation and field of a block inside another."""
    facts, holder = rows[""], rows[""].get("holder", "")
    may_be_absent = holder.startswith("or ")
    model = _block(path, rows, path if may_be_absent and "inert" not in facts else gate)
    if may_be_absent:
        further = {"gate": gate, "note": facts["note"]} if "note" in facts else {"gate": gate}
        kind = (
            Annotated[Literal[False] | model, WrapValidator(_block_or_false)] if holder == "or false" else model | None
        )
        return kind, _field(None if holder == "or null" else False, facts["about"], facts, further)
    if holder == "list":
        return tuple[model, ...], Field(())  # type: ignore[valid-type]
    if holder == "<metric>":
        return Annotated[Mapping[metric, model], AfterValidator(FrozenDict)], Field(FrozenDict())  # type: ignore[valid-type]
    return model, Field(default_factory=model)


def _block_or_false(value: Any, _union: ValidatorFunctionWrapHandler) -> Any:
    """A union would report every fault once per member."""
    return value if value is False else _MODELS["datastates_ckpt"].model_validate(value)


_MODELS: dict[str, type[Block]] = {}
_block("", json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))
UNREAD: Mapping[str, type[Block]] = MappingProxyType(_MODELS)
"""Path of a block -> the model with its keys."""


def __getattr__(name: str) -> type[Block]:
    """The models by class name, which is how pickle finds them."""
    for model in _MODELS.values():
        if model.__name__ == name:
            return model
    raise AttributeError(name)
