"""Scalar types, the base of every block, and what a field says of its key besides type, default and range."""

import math
import os
import re
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr
from pydantic.fields import FieldInfo

AUTO = "auto"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TRAIN, MICRO, ACCUMULATION = BATCH_KEYS
DTYPE_NAMES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "fp16": ("fp16", "float16", "half", "torch.float16", "torch.half"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}


class Support(str, Enum):
    """Degree to which a key is supported; every key has exactly one."""

    HONOURED = "honoured"  # changing the value changes what happens, or is refused
    INERT = "inert here"  # accepted, has no effect with this design or device; said once in the log
    NOT_YET = "not yet"  # asking for it is a DeepSpeedConfigError that says so


@dataclass(frozen=True)
class Key:
    """Describe what this release does with a key. ``note`` says why a key is inert, or what is missing.

    A key asks for something when it is written with a value other than its default and other than those in ``off``.
    ``gate`` is the path of the switch that a detail depends on: a switch that asks for nothing silences the detail.
    A field has a ``Key`` as its ``json_schema_extra``, which pydantic calls to add the text that editors show.
    """

    meaning: str
    support: Support = Support.HONOURED
    note: str = ""
    gate: str = ""
    off: tuple[object, ...] = ()

    @staticmethod
    def of(info: FieldInfo) -> "Key":
        """Return the ``Key`` of a block's field; an empty one for a field that has none."""
        return info.json_schema_extra if isinstance(info.json_schema_extra, Key) else Key("")

    @property
    def text(self) -> str:
        """Return the meaning, and what this release does with the key unless it honours it."""
        status = {Support.INERT: "No effect here", Support.NOT_YET: "Not in this release yet"}.get(self.support)
        note = f": {self.note}." if self.note else "."
        return f"{self.meaning} {status}{note}" if status else self.meaning

    def __call__(self, schema: dict[str, Any]) -> None:
        schema["description"] = self.text


def key(default: Any, meaning: str, *facts: Any, **more: Any) -> Any:
    """Build a field; ``facts`` are the further arguments of its ``Key``, ``more`` those of pydantic's Field."""
    return Field(default, description=meaning, json_schema_extra=Key(meaning, *facts), **more)


def is_auto(value: Any) -> bool:
    """Return whether ``value`` is the text "auto"; nothing but text is compared, in particular no array."""
    return isinstance(value, str) and value == AUTO


class Block(BaseModel):
    """Strict, immutable block of the configuration. null for an inner block means: absent.

    "auto" means the same for any key where ``auto_is_absent``. So it does everywhere while a program's file is read
    before an integration has filled it in (the validation context "lenient").
    """

    # Building validators lazily keeps ``import deepspeed`` light; the first load pays for it.
    model_config = ConfigDict(
        extra="forbid", frozen=True, defer_build=True, arbitrary_types_allowed=True, protected_namespaces=()
    )
    auto_is_absent: ClassVar[bool] = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        kinds = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
        blocks = [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)]
        no_auto = cls.auto_is_absent or bool(info.context and info.context["lenient"])
        absent = {name for name, item in value.items() if no_auto and is_auto(item) or item is None and name in blocks}
        return {name: item for name, item in value.items() if name not in absent}


class AutoBlock(Block):
    """Block in which "auto" for a key means that the key is absent."""

    auto_is_absent: ClassVar[bool] = True


def quoted_hint(value: Any) -> str:
    """Return advice for a number that was written as text; empty for everything else."""
    try:
        readable = isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return ""
    return "; write it without quotes" if readable else ""


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def finite_number(value: Any) -> float:
    """Accept finite numbers; refuse booleans and text."""
    if _is_finite(value):
        return float(value)
    raise ValueError(f"must be a finite number, not {value!r}{quoted_hint(value)}")


def whole_number(value: Any) -> int:
    """Accept whole numbers, also as floats (5e8); refuse booleans and text."""
    is_integer = not isinstance(value, bool) and isinstance(value, Integral)
    if is_integer or (_is_finite(value) and int(value) == value):
        return int(value)
    raise ValueError(f"must be a whole number, not {value!r}{quoted_hint(value)}")


def flag(value: Any) -> Any:
    """Convert the numbers 1 and 0, which many shared files have, to booleans; return every other value as it is."""
    return bool(value) if type(value) is int and value in (0, 1) else value


def _period(value: Any) -> Any:
    """Convert a step count that may be infinite, which means never; files spell it as a word, as JSON has none."""
    if value == float("inf") or (isinstance(value, str) and value.lower() in ("inf", "infinity")):
        return float("inf")
    count = whole_number(value)
    if count <= 0:
        raise ValueError(f"must be at least 1, not {count}; use null to switch the report off")
    return count


def dtype_name(value: Any) -> Any:
    """Normalise every spelling of a dtype, a torch.dtype object included, to fp32, fp16 or bf16."""
    short = next((name for name, spellings in DTYPE_NAMES.items() if str(value).lower() in spellings), None)
    if short is None and value is not None:
        raise ValueError(f"must be one of fp32, fp16, bf16 or null, not {value!r}")
    return short


def name_list(value: Any) -> Any:
    """Return one name or a list of names as a tuple, without repetitions, in order."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(item, str) for item in listed):
        raise ValueError(f"must be a list of names, not {value!r}")
    return tuple(dict.fromkeys(listed))


def byte_count(value: Any) -> int:
    """Convert a whole number or a text such as "3GiB" or "500 MB" to bytes."""
    if isinstance(value, str):
        parts = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt]?)(i?)b)?\s*", value, re.IGNORECASE)
        if not parts or (parts[3] and not parts[2]):
            raise ValueError(f'must be bytes or a text such as "3GiB" or "500MB", not {value!r}')
        size = float(parts[1]) * (1024 if parts[3] else 1000) ** "_kmgt".find((parts[2] or "_").lower())
        if size > 2**63:
            raise ValueError(f"must be below 8 EiB, not {value!r}")
        value = int(size)
    count = whole_number(value)
    if count < 1:
        raise ValueError(f"must be at least 1 byte, not {count}")
    return count


def _no_auto(value: str) -> str:
    if value == AUTO:
        raise ValueError(f"must be a text of your own, not {value!r}")
    return value


class FrozenDict(dict[Any, Any]):
    """Dict that can be read, copied, pickled and written as JSON, and not changed."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("The configuration cannot be changed after it has been read.")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[type["FrozenDict"], tuple[dict[Any, Any]]]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Return ``value`` with every list as a tuple and every dict as a FrozenDict, all the way down."""
    if isinstance(value, dict):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    return tuple(freeze(item) for item in value) if isinstance(value, list | tuple) else value


Flag = Annotated[StrictBool, BeforeValidator(flag)]  # the schema for editors knows true and false alone
Int = Annotated[int, BeforeValidator(whole_number)]
Num = Annotated[float, BeforeValidator(finite_number)]
Count = Annotated[Int, Field(ge=0)]
Positive = Annotated[Int, Field(ge=1)]
Period = Annotated[int | float, BeforeValidator(_period, json_schema_input_type=Positive | Literal["inf"])]
Bytes = Annotated[int, BeforeValidator(byte_count, json_schema_input_type=int | str)]
DtypeName = Literal["fp32", "fp16", "bf16"]
DtypeText = Literal[tuple(name for names in DTYPE_NAMES.values() for name in names)]  # type: ignore[valid-type]
OptionalDtype = Annotated[DtypeName | None, BeforeValidator(dtype_name, json_schema_input_type=DtypeText | None)]
Names = Annotated[tuple[str, ...], BeforeValidator(name_list, json_schema_input_type=str | list[str])]
NameList = Annotated[
    list[str], BeforeValidator(lambda value: [*name_list(value)], json_schema_input_type=str | list[str])
]  # as programs read it, too
Text = Annotated[StrictStr, AfterValidator(_no_auto)]
PathText = Annotated[Text, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
LowerCase = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
UpperCase = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)


class DtypePolicy(NamedTuple):
    """Names of dtypes; None means the parameter's dtype (``compute``: as the model was built). fp64 stays fp64.

    ``compute``: parameters at rest and in the forward, and gradients from autograd; ``low``: the same for the modules
    of ``torch_autocast.lower_precision_safe_modules``; ``accumulation``: the sum over micro-batches; ``reduction``:
    between ranks; ``master``: what the optimizer updates, and its slots; ``buffers``: these, and batch norms.
    """

    compute: DtypeName | None
    low: DtypeName
    accumulation: DtypeName
    reduction: DtypeName | None
    master: DtypeName
    buffers: DtypeName | None
