"""Scalar types and the base model shared by every configuration block."""

import math
import os
import re
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, SupportsFloat, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    model_validator,
)

AUTO = "auto"
DTYPE_NAMES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "fp16": ("fp16", "float16", "half", "torch.float16", "torch.half"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}


class Violation(NamedTuple):
    """One thing that is wrong: the dotted path of the key it is about, and the sentence."""

    path: str
    sentence: str


class Block(BaseModel):
    """A strict, immutable block of the configuration."""

    # Building validators lazily keeps ``import deepspeed`` light; the first load pays for it.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, arbitrary_types_allowed=True)


def quoted_hint(value: Any) -> str:
    """Advice for a number that was written as text; empty for everything else."""
    if not isinstance(value, str):
        return ""
    try:
        readable = math.isfinite(float(value))
    except ValueError:
        return ""
    return "; write it without quotes" if readable else ""


def _is_number(value: object) -> TypeGuard[SupportsFloat]:
    try:
        return isinstance(value, Real) and type(value).__name__ not in ("bool", "bool_") and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def whole_number(value: Any) -> Any:
    """Accept whole numbers, also as floats (5e8); refuse booleans and text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if _is_number(value) and float(value).is_integer():
        return int(float(value))
    raise ValueError(f"must be a whole number, not {value!r}{quoted_hint(value)}")


def finite_number(value: Any) -> Any:
    """Accept finite numbers; refuse booleans and text."""
    if _is_number(value):
        return float(value)
    raise ValueError(f"must be a finite number, not {value!r}{quoted_hint(value)}")


def _period(value: Any) -> Any:
    """A step count that may be infinite, which means never."""
    if isinstance(value, float) and value == math.inf:
        return value
    count = whole_number(value)
    if count <= 0:
        raise ValueError(f"must be at least 1, not {count}; use null to switch the report off")
    return count


def dtype_name(value: Any) -> Any:
    """Normalise every spelling of a dtype, a torch.dtype object included, to fp32, fp16 or bf16."""
    if value is None:
        return None
    text = str(value).lower()
    for short, spellings in DTYPE_NAMES.items():
        if text in spellings:
            return short
    raise ValueError(f"must be one of fp32, fp16, bf16 or null, not {value!r}")


def name_list(value: Any) -> Any:
    """One name or a list of names, without repetitions, in order."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(item, str) for item in listed):
        raise ValueError(f"must be a list of names, not {value!r}")
    return tuple(dict.fromkeys(listed))


Int = Annotated[int, BeforeValidator(whole_number)]
Num = Annotated[float, BeforeValidator(finite_number)]
Flag = StrictBool
Period = Annotated[int | float, BeforeValidator(_period)]
DtypeName = Literal["fp32", "fp16", "bf16"]
OptionalDtype = Annotated[DtypeName | None, BeforeValidator(dtype_name)]
Names = Annotated[tuple[str, ...], BeforeValidator(name_list)]


class FrozenDict(dict[Any, Any]):
    """A dict that can be read, copied, pickled and written as JSON, and not changed."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("The configuration cannot be changed after it has been read.")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[type["FrozenDict"], tuple[dict[Any, Any]]]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """``value`` with every list as a tuple and every dict as a FrozenDict, all the way down."""
    if isinstance(value, dict):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    return tuple(freeze(item) for item in value) if isinstance(value, list | tuple) else value


def _spoken(value: str) -> str:
    if value == AUTO:
        raise ValueError(f"must be a text of your own, not {value!r}")
    return value


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"must be a regular expression, not {value!r}: {error}") from None
    return value


def _listed(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list [...], not {value!r}")
    return value


def _attribute(value: str) -> str:
    if not value or "." in value:
        raise ValueError(f"must be the name of a direct attribute, without dots, not {value!r}")
    return value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)]
Count = Annotated[Int, Field(ge=0)]
Positive = Annotated[Int, Field(ge=1)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_listed)]
Text = Annotated[StrictStr, AfterValidator(_spoken)]
PathText = Annotated[Text, BeforeValidator(_path_text)]
Pattern = Annotated[Text, AfterValidator(_pattern)]
AttributeName = Annotated[Text, AfterValidator(_attribute)]


def _is_block(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


class NestingBlock(Block):
    """A block in which null for an inner block means: absent.

    ``auto_is_absent``: so does "auto" for any key. ``required_if_enabled`` lists the keys that ``enabled`` true needs.
    """

    model_config = ConfigDict(protected_namespaces=())
    auto_is_absent: ClassVar[bool] = False
    required_if_enabled: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        blocks = {name for name, info in cls.model_fields.items() if _is_block(info.annotation)}
        autos = {key for key, item in value.items() if cls.auto_is_absent and isinstance(item, str) and item == AUTO}
        return {key: item for key, item in value.items() if key not in autos and not (item is None and key in blocks)}

    @model_validator(mode="after")
    def _complete(self) -> Any:
        missing = [key for key in self.required_if_enabled if key not in self.model_fields_set]
        if missing and getattr(self, "enabled", False):
            raise ValueError(f"has enabled true and needs {', '.join(missing)}")
        return self


_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def byte_count(value: Any) -> Any:
    """Bytes, from a whole number or a text such as "3GiB" or "500 MB"."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        if not found or found[2].lower() not in _UNITS:
            raise ValueError(f'must be bytes or a text such as "3GiB" or "500MB", not {value!r}')
        size = float(found[1]) * _UNITS[found[2].lower()]
        if size > 2**63:
            raise ValueError(f"must be below 8 EiB, not {value!r}")
        value = int(size)
    count = whole_number(value)
    if count < 1:
        raise ValueError(f"must be at least 1 byte, not {count}")
    return count


Bytes = Annotated[int, BeforeValidator(byte_count)]
