"""Client state travels as JSON and tensors: exactly, types included, and nothing is ever unpickled."""

import datetime
import enum
import json
import math
import struct
import typing
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from deepspeed.checkpoint.format.plain import DEEPEST, Collected, decode, encode
from deepspeed.errors import CheckpointError, PlainStateError
from tests.harness.rows import for_each


def through(value: Any) -> Any:
    """The value after encoding, JSON text and decoding."""
    encoded = encode(value, name="client_state")
    text = json.dumps(encoded.json, allow_nan=False)
    return decode(json.loads(text), encoded.tensors.__getitem__)


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, with nan equal to itself bit by bit, order of keys and signs of zero counted."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        alike = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        return alike and same(a.tolist(), b.tolist())
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(v, w) for v, w in zip(a, b, strict=True))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(v, w) for w in b) for v in a)
    if isinstance(a, Namespace):
        return same(vars(a), vars(b))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, datetime.datetime):
        return repr(a) == repr(b)
    return bool(a == b)


HALF, JOINED = "\ud83d\ude00", "\U0001f600"  # two surrogates, which JSON must not join, and one character
EXAMPLES = [
    *(None, True, 0, 2**63 - 1, -(2**63), 2**63, -(7**9000)),
    *(0.1, 5e-324, -0.0, math.nan, math.inf, -math.inf, complex(-0.0, math.nan)),
    struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    *("", "a\x00b\U0001f600", "\ud800 alone, and \U0001f600 whole", "\ud800"),
    *(HALF, [HALF, JOINED], {HALF: 1, JOINED: 2}, {"a": {HALF: HALF}}),
    *(b"", b"\x00\xff" * 10, bytes(range(256)) * 100, bytearray(b"abc")),
    *([], (), (1, (2,), [3]), set(), {1, "1", 2.5, (1, 2), frozenset({3})}, frozenset({None, False})),
    *({}, {"a": {"b": [1]}}, {"z": 1, "a": 2}),
    # keys that look like marks are only keys
    *({"$": 1}, {"$": "tuple", "items": [1]}, [{"$": "pickled", "ref": "client_state/0"}]),
    {1: "a", "1": "b", (2, 3): "c", None: "d", 2.5: "e"},
    {"\U0001f600": torch.ones(1), 7**9000: torch.zeros(1), "k" * 1000: torch.zeros(2)},
    *(OrderedDict([("b", 1), ("a", 2)]), OrderedDict({1: 2})),
    *(Counter({3: 1, "a": -2, (1,): 0.5}), Counter(), deque([1, (2,), {3}]), deque([], maxlen=0)),
    *(datetime.timedelta(days=-3, microseconds=7), datetime.timedelta.max, datetime.date(2024, 2, 29)),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
    datetime.datetime(1, 1, 1, tzinfo=datetime.timezone.utc),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(seconds=-3601))),
    Namespace(lr=0.1, layers=(1, 2), out=Path("x/y"), nested=Namespace(a=1)),
    *(Path("/a/b"), PurePosixPath("a/../b"), PureWindowsPath("C:\\a")),
    *(torch.bfloat16, torch.float8_e4m3fn, torch.device("cuda", 3), torch.device("cpu")),
    *(torch.Size([2, 0, 3]), torch.Size([])),
    *(torch.tensor(3.5), torch.zeros(0, 4), torch.arange(6).view(2, 3).t(), torch.ones(2, requires_grad=True)),
    *(torch.tensor([1 + 2j]).conj(), torch.ones(3, dtype=torch.bfloat16).expand(2, 3)),
    np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
    *(np.array(2.5), np.zeros((0, 3), np.float32), np.array([True, False]), np.arange(1000, dtype=np.float64)),
    *(np.array(["a", "bcd"]), np.array([b"a", b"bcd"]), np.array([1, 2], ">i4"), np.array([1.5], np.longdouble)),
    np.array(["2020-01-01", "NaT"], dtype="datetime64[ns]"),
    *(np.float32(1.5), np.float64(math.nan), np.bool_(True), np.int64(-3), np.complex64(1j)),
    *(np.str_("ab"), np.bytes_(b"ab"), np.datetime64("2020-01-01T00:00"), np.timedelta64(5, "s")),
]


@for_each("value", [np.str_(""), np.bytes_(b"")])
def test_empty_text_of_numpy_comes_back_also_from_dtypes_without_width(value: Any) -> None:
    assert same(through({"run": value}), {"run": value})
    written = {"$": "numpy.scalar", "dtype": value.dtype.str, "base64": ""}
    assert written["dtype"][1:] in ("U0", "S0") and same(decode(written, {}.__getitem__), value)


@for_each("value", EXAMPLES)
def test_values_come_back_exactly_with_their_types(value: Any) -> None:
    assert same(through(value), value)
    assert same(through({"inside": [value]}), {"inside": [value]})


@pytest.mark.parametrize("dtype", [d for d in vars(torch).values() if isinstance(d, torch.dtype)], ids=str)
def test_tensors_of_any_dtype_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    if dtype in (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4) or "bits" in str(dtype):
        pytest.skip("no values of its own")
    bits = torch.arange(dtype.itemsize * 4, dtype=torch.uint8)
    if dtype == torch.bool:
        bits = bits % 2
    try:
        value = bits.view(dtype)
    except RuntimeError:
        pytest.skip("torch makes no such tensor")
    found = through(value)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), bits)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.text(st.sampled_from("a$\U0001f600/"))
    | st.binary()
    | st.sampled_from([torch.float32, torch.device("cpu"), PurePosixPath("a"), np.float32(2), np.int8(-1)])
)
HASHABLE = st.recursive(
    LEAVES.filter(lambda v: v == v), lambda s: st.tuples(s, s) | st.frozensets(s, max_size=3), max_leaves=5
)


def _namespace(entries: dict[str, object]) -> Namespace:
    """Make one with any names, "self" too."""
    made = Namespace()
    vars(made).update(entries)
    return made


VALUES = st.recursive(
    LEAVES
    | st.binary(max_size=9).map(bytearray)
    | st.lists(st.floats(width=32)).map(torch.tensor)
    | st.lists(st.integers(0, 9)).map(np.array),
    lambda s: (
        st.lists(s, max_size=4)
        | st.lists(s, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.just("$"), s, max_size=4)
        | st.dictionaries(HASHABLE, s, max_size=4)
        | st.dictionaries(HASHABLE, s, max_size=4).map(OrderedDict)
        | st.dictionaries(st.text(max_size=5), s, max_size=3).map(_namespace)
        | st.sets(HASHABLE, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_any_nested_value_comes_back_exactly(value: Any) -> None:
    assert same(through(value), value)


TAGS = (
    "int float complex str bytes bytearray tuple set frozenset dict OrderedDict Namespace Path PurePosixPath tensor "
    "torch.dtype torch.device torch.Size numpy.ndarray numpy.scalar numpy.str numpy.bytes pickled eval os.system"
)
KEYS = "items value base64 tensor name dtype shape hex bits ref attributes requires_grad"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["U", "O", "i4,i4", "AAAA", "1", "a"]),
    lambda s: (
        st.lists(s, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS.split()), s)
        | st.builds(
            lambda tag, rest: {**rest, "$": tag},
            st.sampled_from(TAGS.split()),
            st.dictionaries(st.sampled_from(KEYS.split()), s),
        )
    ),
    max_leaves=10,
)


@given(JSON)
def test_malformed_content_is_refused_with_one_kind_of_error(content: Any) -> None:
    try:
        decode(content, {"a": torch.zeros(2)}.__getitem__)
    except CheckpointError as error:
        assert str(error)


@for_each(
    "content",
    [
        {"$": "system", "items": ["true"]},
        {"$": ["tuple"]},
        {"$": "tuple"},
        {"$": "set", "items": [[1]]},
        {"$": "dict", "items": [[1]]},
        {"$": "torch.dtype", "value": "load"},
        {"$": "torch.device", "value": "nonsense"},
        {"$": "numpy.ndarray", "dtype": "O", "shape": [1], "base64": "AAAAAAAAAAA="},
        {"$": "numpy.ndarray", "dtype": "i4,i4", "shape": [1], "base64": "AAAAAAAAAAA="},
        {"$": "numpy.ndarray", "dtype": "i8", "shape": [2**62], "base64": ""},
        {"$": "numpy.ndarray", "dtype": "i8", "shape": [-1], "base64": ""},
        {"$": "tensor", "name": "missing"},
        {"$": "bytes", "base64": "?"},
        {"$": "float", "bits": "00"},
        {"$": "timedelta", "value": [10**12]},
        {"$": "timedelta", "value": ["a"]},
        {"$": "date", "value": 5},
        {"$": "datetime", "value": "yesterday"},
        {"$": "deque", "items": [], "longest": -1},
        {"$": "deque", "items": [], "longest": 2**80},
        {"$": "Counter", "items": [[[1], 2]]},
        {"$": "OrderedDict", "items": [], "attributes": 5},
        object(),
        (1, 2),
    ],
)
def test_known_bad_content_is_refused(content: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(content, {}.__getitem__)


# What the first releases wrote otherwise than this one does.
OLDER: list[tuple[Any, Any]] = [
    ({"$": "str", "base64": "7aC97biA"}, "\ud83d\ude00"),
    ({"$": "dict", "items": [[{"$": "str", "base64": "7aCA"}, 1]]}, {"\ud800": 1}),
    ({"$": "numpy.str", "value": "a\x00"}, np.str_("a\x00")),
    ({"$": "numpy.bytes", "base64": "YQA="}, np.bytes_(b"a\x00")),
    ({"$": "Path", "value": {"$": "str", "base64": "YS/ts78="}}, Path("a/\udcff")),
    ({"$": "deque", "items": [1], "longest": None}, deque([1])),
    ({"$": "bytearray", "tensor": "a"}, bytearray(range(4))),
]


@for_each(("content", "value"), OLDER)
def test_what_earlier_releases_wrote_is_read(content: Any, value: Any) -> None:
    assert same(decode(content, {"a": torch.arange(4, dtype=torch.uint8)}.__getitem__), value)


def test_plain_json_stays_readable() -> None:
    state = {"epoch": 3, "best": 0.25, "name": "run", "history": [1, None, True]}
    assert encode(state, name="client_state").json == state


def test_tensors_are_named_by_path() -> None:
    state = {"a": [torch.zeros(1)], 1: torch.zeros(2), "1": torch.zeros(3), "a/0": torch.zeros(4)}
    tensors = encode(state, name="client_state").tensors
    assert {name: t.numel() for name, t in tensors.items()} == {
        "client_state/a/0": 1,
        "client_state/1": 2,
        "client_state/1~2": 3,
        "client_state/a/0~2": 4,
    }


def test_a_tensor_met_twice_is_stored_once_and_is_one_object_again() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    empty = torch.zeros(0)
    state = {"a": weight, "b": [weight, weight.detach()], "e": empty, "f": empty, "part": weight[:2]}
    assert len(encode(state, name="s").tensors) == 3
    found = through(state)
    assert found["a"] is found["b"][0]
    assert found["a"].requires_grad
    assert not found["b"][1].requires_grad
    assert found["b"][1].data_ptr() == found["a"].data_ptr()
    assert found["e"] is found["f"]


def test_a_state_dict_keeps_what_load_state_dict_reads() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    found = through(model.state_dict())
    assert found._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    model.load_state_dict(found)


class Level(enum.IntEnum):
    HIGH = 1


class Mine:
    pass


Point = namedtuple("Point", "x y")
STRANGERS = {
    "an enum": Level.HIGH,
    "a named tuple": Point(1, 2),
    "a default dict": defaultdict(list),
    "the second of two equal hours": datetime.datetime(2024, 10, 27, 2, 30, fold=1),
    "a named zone": datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "X")),
    "a str of its own kind": typing.cast(Any, type("Text", (str,), {}))("x"),
    "an object": Mine(),
    "a function": len,
    "a class": int,
    "objects in numpy": np.array([None]),
    "records": np.zeros(2, dtype="i4,f4"),
    "no values": torch.ones(2, device="meta"),
    "sparse": torch.eye(2).to_sparse(),
    "an array of its own kind": np.ma.masked_array([1]),
}


@pytest.mark.filterwarnings("ignore")
@for_each("name", STRANGERS)
def test_what_json_would_lose_is_refused(name: str) -> None:
    value = STRANGERS[name]
    with pytest.raises(PlainStateError, match=type(value).__name__):
        encode({"a": (1, value)}, name="client_state")


def test_all_that_cannot_be_stored_is_named_at_once_with_the_way_out() -> None:
    state = {"ok": 1, "objects": [Mine() for _ in range(12)], "f": {"g": len}}
    with pytest.raises(PlainStateError) as caught:
        encode(state, name="client_state")
    text = str(caught.value)
    assert text.startswith("13 object(s)")
    assert "client_state/objects/9: " in text
    assert "test_plain_state.Mine" in text
    assert "client_state/objects/10" not in text
    assert "and 3 more" in text
    assert "checkpoint.allow_pickle: true" in text


def test_a_setting_is_advised_only_where_it_has_an_effect() -> None:
    with pytest.raises(PlainStateError) as caught:
        Collected().add({"level": Level.HIGH}, "lr_scheduler")
    text = str(caught.value)
    assert "lr_scheduler/level" in text and "state_dict()" in text and "allow_pickle" not in text


def test_with_the_opt_in_only_strangers_are_left_out() -> None:
    one = Mine()
    state = {"a": [1, one], "b": (torch.ones(1), Level.HIGH), one: 2, "$": {"x": 1}}
    encoded = encode(state, name="client_state", allow_rest=True)
    rest = encoded.rest
    assert set(rest) == {"client_state/a/1", "client_state/b/1", "client_state/key 2"}
    read = encoded.tensors.__getitem__
    found = decode(json.loads(json.dumps(encoded.json)), read, pickled=rest)
    assert found["a"] == [1, one]
    assert found["b"][1] is Level.HIGH
    assert found[one] == 2
    assert found["$"] == {"x": 1}
    with pytest.raises(CheckpointError, match=r"3 object\(s\)[^$]*client_state/a/1[^$]*checkpoint.allow_pickle: true"):
        decode(encoded.json, read)
    del rest["client_state/b/1"]
    with pytest.raises(CheckpointError, match=r"1 object\(s\)[^$]*client_state/b/1"):
        decode(encoded.json, read, pickled=rest)


def test_a_cycle_is_named() -> None:
    state: dict[str, Any] = {"a": {"b": []}}
    state["a"]["b"].append(state["a"])
    with pytest.raises(PlainStateError, match="client_state/a/b/0/b/0/b.* contains itself"):
        encode(state, name="client_state")
    shared = [1]
    assert through([shared, shared]) == [[1], [1]]


@pytest.mark.parametrize(
    "kind", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}, lambda v: Namespace(**{"$": v})]
)
def test_deep_nesting_is_a_clean_error_and_what_is_allowed_comes_back(kind: Any) -> None:
    value: Any = 1
    for _ in range(DEEPEST):
        value = kind(value)
    assert same(through(value), value)
    for _ in range(10_000):
        value = kind(value)
    with pytest.raises(PlainStateError, match="levels deep"):
        encode(value, name="client_state")
    content: Any = 1
    for _ in range(10_000):
        content = [content]
    with pytest.raises(CheckpointError, match="nested too deeply"):
        decode(content, {}.__getitem__)
    while isinstance(value, Namespace):  # freed level by level
        value = vars(value).pop("$")
