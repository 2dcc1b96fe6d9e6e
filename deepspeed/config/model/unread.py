"""The keys that no code reads: of features that this release lacks, and without effect in it.

They are data, ``unread.json``: block -> key -> [type, default, meaning, further facts of ``Key``]. The row "" is about
the block: ``holder`` says where it stands when it is not simply a block ("class": it goes on in a class in Python),
``switch`` on which key the others hang, and ``auto`` that "auto" is as good as absent.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WrapValidator, create_model

from deepspeed.config.model import values
from deepspeed.config.model.values import AutoBlock, Block, FrozenDict, freeze

if TYPE_CHECKING:  # some of the models that ``_block`` makes: those that other modules inherit
    ActivationCheckpointingKeys: TypeAlias = Block
    AioKeys: TypeAlias = Block
    CheckpointKeys: TypeAlias = Block
    ExpertParallelKeys: TypeAlias = Block
    Keys: TypeAlias = Block
    OptimizerKeys: TypeAlias = Block
    PipelineKeys: TypeAlias = Block
    TensorParallelPartitionConfigKeys: TypeAlias = Block
    Bf16Keys: TypeAlias = AutoBlock
    CompileKeys: TypeAlias = AutoBlock
    Fp16Keys: TypeAlias = AutoBlock
    HybridEngineKeys: TypeAlias = AutoBlock
    TensorParallelKeys: TypeAlias = AutoBlock
    TensorParallelTensorParallelKeys: TypeAlias = AutoBlock
    ZeroOptimizationKeys: TypeAlias = AutoBlock
    ZeroOptimizationOffloadOptimizerKeys: TypeAlias = AutoBlock
    ZeroOptimizationZenflowKeys: TypeAlias = AutoBlock


def from_a_program(value: Any) -> Any:
    """Return an object that only a program can pass; raise ValueError for a value that a file can hold."""
    if isinstance(value, str | bytes | int | float | list | tuple | dict):
        raise ValueError(f"is an object that only a program can pass, not {value!r}; delete it")
    return value


metric = NewType("metric", str)  # a name of the user's choice: "<metric>" in paths
_TYPES: Mapping[str, Any] = {
    "bool": values.Flag,
    "int": values.Int,
    "float": values.Num,
    "text": values.PathText,
    "names": values.Names,
    "dtype": Annotated[values.DtypeName, BeforeValidator(values.dtype_name, json_schema_input_type=values.DtypeText)],
    "auto or int": values.Positive | Literal["auto"],
    "auto or float": values.Num | Literal["auto"],
    "list": Annotated[tuple[Any, ...], BeforeValidator(freeze)],
    "list of int": tuple[values.Count, ...],
    "block of text": Annotated[dict[str, values.Text], AfterValidator(freeze)],
    "block": Annotated[dict[str, Any], AfterValidator(freeze)],
    "object": Annotated[Any, BeforeValidator(from_a_program)],
    "null": type(None),
}
_SIGNS = {">=": "ge", ">": "gt", "<=": "le", "<": "lt"}
UNREAD: dict[str, type[Block]] = {}
"""Path of a block -> the model with its keys, which is also an attribute of this module."""


class OpenBlock(Block):
    """Block in which a client may keep keys of its own."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(freeze)]]


def _type(words: str | list[Any], default: Any) -> Any:
    """Return the annotation that a row's first cell describes: a list of choices, a list of such a list, or words."""
    if isinstance(words, list) and isinstance(words[0], list):
        choice: Any = Literal[tuple(words[0])]
        kind: Any = tuple[choice, ...]
    elif isinstance(words, list):
        kind = Annotated[Literal[tuple(words)], values.UpperCase if words[0].isupper() else Field()]
    else:
        name, *bounds = re.split(r" (?=[<>])", words)
        limits = {_SIGNS[sign]: json.loads(number) for sign, number in map(str.split, bounds)}
        kind = Annotated[_TYPES[name], Field(**limits)] if limits else _TYPES[name]
    return kind | None if default is None and words != "object" else kind


def _field(default: Any, meaning: str, block: Mapping[str, Any], further: dict[str, Any]) -> Any:
    """Build the field of a key; the reason why it is inert stands in its own row, or in that of its block."""
    note = further.pop("inert", None if "note" in further else block.get("inert"))
    if note is not None:
        return values.key(default, meaning, values.Support.INERT, note)
    gate, off = further["gate"], tuple(further.get("off", ()))
    return values.key(default, meaning, values.Support.NOT_YET, further.get("note", ""), gate, off)


def _block(path: str, rows: dict[str, Any], gate: str = "") -> Any:
    """Build annotation and field of one block, or None where a class has its other keys; ``gate``: the outer switch."""
    facts = rows.pop("")
    holder, further = facts.get("holder", ""), {"gate": gate}
    if holder.startswith("or ") and "inert" not in facts:
        gate = path
    switch = f"{path}.{facts['switch']}" if "switch" in facts else gate
    fields: dict[str, Any] = {}
    for name, row in rows.items():
        place = f"{path}.{name}".lstrip(".")
        if isinstance(row, dict):
            fields[name] = _block(place, row, switch)
        else:
            words, default, meaning, *more = row
            hangs = {"gate": gate if switch == place else switch, **(more[0] if more else {})}
            absent = ... if default == "required" else freeze(default)
            fields[name] = (_type(words, default), _field(absent, meaning, facts, hangs))
    base = OpenBlock if "own keys" in facts else AutoBlock if "auto" in facts else Block
    name = "".join(part.title().replace("_", "") for part in path.split(".")) + "Keys"
    fields = {name: field for name, field in fields.items() if field is not None}
    model: Any = create_model(name, __base__=base, __module__=__name__, __doc__=facts.get("about"), **fields)
    UNREAD[path] = globals()[name] = model
    if holder.startswith("or "):
        further |= {"note": facts["note"]} if "note" in facts else {}
        # a union would report every fault once per member
        check = WrapValidator(lambda value, _union: value if value is False else model.model_validate(value))
        absent = None if holder == "or null" else False
        kind = model | None if absent is None else Annotated[Literal[False] | model, check]
        return kind, _field(absent, facts["about"], facts, further)
    if holder == "list":
        return tuple[model, ...], Field(())
    if holder == "<metric>":
        return Annotated[Mapping[metric, model], AfterValidator(FrozenDict)], Field(FrozenDict())
    return None if holder == "class" else (model, Field(default_factory=model))


_block("", json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))
