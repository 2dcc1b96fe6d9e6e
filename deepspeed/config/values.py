"""Scalar types and the base model shared by every configuration block."""

import math
from numbers import Real
from typing import Annotated, Any, Literal, SupportsFloat, TypeGuard

from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictBool

AUTO = "auto"
DTYPE_NAMES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "fp16": ("fp16", "float16", "half", "torch.float16", "torch.half"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}


class Block(BaseModel):
    """A strict, immutable block of the configuration."""

    # Building validators lazily keeps ``import deepspeed`` light; the first load pays for it.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, arbitrary_types_allowed=True)


def _quoted_hint(value: Any) -> str:
    try:
        float(value)
    except (TypeError, ValueError):
        return ""
    return "; write it without quotes"


def _is_number(value: object) -> TypeGuard[SupportsFloat]:
    return isinstance(value, Real) and type(value).__name__ not in ("bool", "bool_") and math.isfinite(value)


def whole_number(value: Any) -> Any:
    """Accept whole numbers, also as floats (5e8); refuse booleans and text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if _is_number(value) and float(value).is_integer():
        return int(float(value))
    raise ValueError(f"must be a whole number, not {value!r}{_quoted_hint(value) if isinstance(value, str) else ''}")


def _number(value: Any) -> Any:
    """Accept finite numbers; refuse booleans and text."""
    if _is_number(value):
        return float(value)
    raise ValueError(f"must be a finite number, not {value!r}{_quoted_hint(value) if isinstance(value, str) else ''}")


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
Num = Annotated[float, BeforeValidator(_number)]
Flag = StrictBool
Period = Annotated[int | float, BeforeValidator(_period)]
DtypeName = Literal["fp32", "fp16", "bf16"]
OptionalDtype = Annotated[DtypeName | None, BeforeValidator(dtype_name)]
Names = Annotated[tuple[str, ...], BeforeValidator(name_list)]
