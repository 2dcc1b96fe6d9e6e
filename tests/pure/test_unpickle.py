"""Files of torch.save are read without executing anything: what is plain comes back, what is not is refused by name."""

import copyreg
import io
import os
import pickle
import struct
import threading
import warnings
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from deepspeed.checkpoint.foreign.unpickle import FileTensor, load_restricted, materialize
from deepspeed.errors import CheckpointError


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """A command that leaves a trace; checks afterwards that it never ran."""
    trace = tmp_path / "executed"
    yield lambda: f"touch {trace}"
    assert not trace.exists()


def packed(path: Path, content: bytes, **records: bytes) -> Path:
    """A file of torch.save with this pickle inside."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", content)
        archive.writestr("x/byteorder", b"little")
        archive.writestr("x/version", b"3\n")
        for name, value in records.items():
            archive.writestr(f"x/data/{name.removeprefix('r')}", value)
    return path


def refused(path: Path, content: bytes, words: str, **records: bytes) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        materialize(load_restricted(packed(path / "file.pt", content, **records)))
    assert "file.pt" in str(caught.value)


def stored(path: Path, value: Any) -> Any:
    """Save ``value`` as torch does and read it; its tensors are still in the file."""
    torch.save(value, path / "file.pt")
    return load_restricted(path / "file.pt")


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


# -- what is plain -----------------------------------------------------------------------------------------------

PLAIN = [
    {"a": [1, 2.5, True, None, "x", b"y", b"", 2**80, -1, 3 + 4j], 1: (1, (2,), ()), "s": {1, 2}, "f": frozenset({3})},
    OrderedDict([("b", 1), ("a", OrderedDict())]),
    {"args": Namespace(lr=0.1, inner=Namespace(x=[1])), "path": Path("a/b"), "pure": PurePosixPath("c")},
    [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.Size([1, 2])],
    [np.float32(1.5), np.int64(3), np.bool_(True), np.array(["a", "bc"]), np.array([1], ">i4")],
    [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 3), np.uint8)), np.zeros((0, 2)), np.array(7)],
    [Counter({3: 2}), Counter({"a": torch.ones(2)}), {torch.ones(2)}, frozenset([torch.ones(2)])],
    bytearray(b"abc"),
]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype and a.requires_grad == b.requires_grad
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, set | frozenset) and any(isinstance(each, torch.Tensor) for each in a):
        return type(a) is type(b) and equal([*a], [*b])  # of one
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("value", PLAIN, ids=lambda v: type(v).__name__)
def test_plain_values_come_back(tmp_path: Path, value: Any) -> None:
    assert equal(materialize(stored(tmp_path, value)), value)


@pytest.mark.parametrize("protocol", [0, 4, 5])
def test_a_protocol_that_torch_does_not_read_safely_is_refused_with_what_to_do(tmp_path: Path, protocol: int) -> None:
    torch.save({"a": 1}, tmp_path / "file.pt", pickle_protocol=protocol)
    told = r"file\.pt cannot be read .* save it with torch.save's own pickle_protocol=2"
    with pytest.raises(CheckpointError, match=told):
        load_restricted(tmp_path / "file.pt")


class Mine:
    """A class that the program itself told torch to be safe."""


def test_what_the_program_added_to_the_safe_classes_is_built_too_and_stays_added(tmp_path: Path) -> None:
    torch.save([Mine(), np.float32(1)], tmp_path / "mine.pt")
    with pytest.raises(CheckpointError, match=r"mine\.pt needs .*Mine, not among the classes"):
        load_restricted(tmp_path / "mine.pt")
    with torch.serialization.safe_globals([Mine, np.dtype]):
        before = set(torch.serialization.get_safe_globals())
        assert type(load_restricted(tmp_path / "mine.pt")[0]) is Mine
        assert set(torch.serialization.get_safe_globals()) == before


def test_threads_that_read_at_once_leave_the_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": [1, bytearray(b"x")]}, tmp_path / "file.pt")
    inside, most = 0, 0
    real = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        again.wait(0.02)  # another thread gets every chance to come in
        inside -= 1
        return real(*args, **kwargs)

    again = threading.Event()
    table = torch._weights_only_unpickler._get_allowed_globals()
    with torch.serialization.safe_globals([Mine]):
        before = set(torch.serialization.get_safe_globals()), list(warnings.filters), dict(table)
        monkeypatch.setattr(torch, "load", load)
        with ThreadPoolExecutor(3) as threads:
            done = [*threads.map(load_restricted, [tmp_path / "file.pt"] * 3)]
        assert (set(torch.serialization.get_safe_globals()), list(warnings.filters), dict(table)) == before
    assert done == [{"a": [1, bytearray(b"x")]}] * 3
    assert most == 1


def test_a_class_added_while_a_file_is_read_stays_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        torch.serialization.add_safe_globals([Mine])
        return real(*args, **kwargs)

    before = set(torch.serialization.get_safe_globals())
    monkeypatch.setattr(torch, "load", load)
    with torch.serialization.safe_globals([]):
        try:
            assert stored(tmp_path, 1) == 1
            assert set(torch.serialization.get_safe_globals()) == before | {Mine}
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(list(before))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [d for d in vars(torch).values() if isinstance(d, torch.dtype)], ids=str)
def test_tensors_of_any_dtype_come_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    if str(dtype).startswith(("torch.qu", "torch.qi")):
        pytest.skip("quantized tensors are not read")
    bits = torch.arange(dtype.itemsize * 6, dtype=torch.uint8)
    if dtype == torch.bool:
        bits %= 2
    try:
        value = bits.view(dtype)
        torch.save(value, tmp_path / "file.pt")
    except (RuntimeError, TypeError, KeyError, AttributeError):
        pytest.skip("torch writes no such tensor")
    found = load_restricted(tmp_path / "file.pt")
    assert isinstance(found, FileTensor)
    assert found.dtype == dtype
    assert torch.equal(found.tensor().view(torch.uint8), bits)
    part = torch.empty(3, dtype=dtype)
    found.read(part, start=2)
    assert torch.equal(part.view(torch.uint8), bits.view(6, -1)[2:5].reshape(-1))


def test_views_keep_their_values_and_parameters_their_flag(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    tied = torch.nn.Parameter(torch.ones(2))
    odd = torch.ones(3)
    odd.note = "an attribute"  # type: ignore[attr-defined]
    value = {
        "part": base[5:9],
        "turned": base.view(4, 6).t(),
        "strided": base[1::3],
        "scalar": torch.tensor(2.0),
        "empty": torch.zeros(0, 3),
        "tied": [tied, tied],
        "odd": odd,
    }
    in_file = stored(tmp_path, value)
    found = materialize(in_file)
    assert equal({**found, "odd": None}, {**value, "odd": None})
    assert torch.equal(found["odd"], odd)
    assert found["tied"][0] is found["tied"][1]
    for name in ("part", "turned", "strided"):
        flat = value[name].reshape(-1)  # type: ignore[union-attr]
        for start in range(flat.numel()):
            out = torch.empty(flat.numel() - start, dtype=torch.float64)
            in_file[name].read(out, start=start)
            assert torch.equal(out, flat[start:].double())


def test_a_parameter_and_its_data_keep_a_flag_each(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    for value in ([weight, weight.data], [weight.data, weight]):
        found = materialize(stored(tmp_path, value))
        assert [t.requires_grad for t in found] == [t.requires_grad for t in value]


def test_what_is_shared_is_visited_once_and_stays_shared(tmp_path: Path) -> None:
    value: Any = [torch.ones(1)]
    for _ in range(60):  # 2**60 visits, were each reference followed
        value = [value, {"a": value}]
    found = materialize(stored(tmp_path, value))
    for _ in range(60):
        assert found[0] is found[1]["a"]
        found = found[0]
    assert torch.equal(found[0], torch.ones(1))


def test_foreign_objects_are_only_their_attributes(tmp_path: Path) -> None:
    content = (
        b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n)\x81}(X\x09\x00\x00\x00cur_scaleG@\x00\x00\x00\x00\x00\x00\x00"
        b"X\x09\x00\x00\x00__class__K\x01X\x0c\x00\x00\x00__setstate__K\x02ub."
    )
    found = load_restricted(packed(tmp_path / "file.pt", content))
    assert type(found) is Namespace
    assert vars(found) == {"cur_scale": 2.0, "__class__": 1, "__setstate__": 2}
    level = b"\x80\x02cdeepspeed.runtime.zero.config\nZeroStageEnum\nK\x03\x85R."
    assert load_restricted(packed(tmp_path / "level.pt", level)) == 3


# -- what is not -------------------------------------------------------------------------------------------------


CALLED = [os.system, eval, exec, __import__, torch.load, torch.hub.load, np.load, pickle.loads, io.open, Path.unlink]


@pytest.mark.parametrize("protocol", [1, 2, 3])  # in the others no class is reached
def test_a_call_of_anything_else_is_refused_by_name(tmp_path: Path, canary: Callable[[], str], protocol: int) -> None:
    calls: list[tuple[Any, ...]] = [(function, canary()) for function in CALLED]
    calls += [(getattr, "os", "system"), (type, "X", (), {})]  # modules do not pickle, so that "os" stands for one
    calls += [(copyreg._reconstructor, dict, object, None)]  # type: ignore[attr-defined]
    for function, *args in calls:
        content = pickle.dumps({"x": [Calls(function, *args)]}, protocol=protocol)
        refused(tmp_path, content, f"needs .*({function.__name__}|getattr)")


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


NAMES = [
    "collections\nOrderedDict.__class__",
    "collections\nOrderedDict.__init__.__globals__",
    "torch\nSize.__class__",
    "torch\nSize.__reduce__",
    "deepspeed.runtime.zero.config\nZeroStageEnum.__class__",
    "deepspeed.utils.tensor_fragment\nos",
    "deepspeed.runtime.fp16.loss_scaler\nlogger",
    "torch.storage\n_load_from_bytes",
    "torch\nos",
    "torch\n__builtins__",
    "torch\n",
    "builtins\nset.__class__",
    "pathlib\nos",
    "_codecs\nlookup",
    "argparse\n_os",
]


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    for name in NAMES:
        module, _, attribute = name.partition("\n")
        refused(tmp_path, b"\x80\x02c" + name.encode() + b"\n.", "not among the classes")
        refused(tmp_path, b"\x80\x04" + text(module) + text(attribute) + b"\x93.", "Unsupported operand")


def test_operations_that_torch_never_writes_are_refused(tmp_path: Path, canary: Callable[[], str]) -> None:
    copyreg.add_extension("os", "system", 0x7E)
    try:
        cached = io.BytesIO(b"\x80\x02\x82\x7e.")
        assert pickle.load(cached) is os.system  # now the registry has a cached entry
        refused(tmp_path, b"\x80\x02\x82\x7e" + text(canary()) + b"\x85R.", "Unsupported operand")
    finally:
        copyreg.remove_extension("os", "system", 0x7E)
        copyreg._extension_cache.pop(0x7E, None)  # type: ignore[attr-defined]
    refused(tmp_path, b"(S'" + canary().encode() + b"'\nios\nsystem\n.", "Unsupported operand")
    refused(tmp_path, b"(" + text(canary()) + b"ios\nsystem\n.", "Unsupported operand")
    refused(tmp_path, b"(ccollections\nOrderedDict\n" + text(canary()) + b"o.", "Unsupported operand")
    refused(tmp_path, b"\x80\x04ccollections\nOrderedDict\n)}\x92.", "Unsupported operand")
    refused(tmp_path, b"Pos.system\n.", "Unsupported operand")


def test_calls_and_states_of_the_wrong_things_are_refused(tmp_path: Path) -> None:
    ordered, scaler = b"ccollections\nOrderedDict\n", b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n"
    for content in (
        scaler + b"K\x01\x85R.",
        ordered + b")R)R.",
        b"]" + b")R.",
        ordered + b"}b.",  # a state for the class itself
        b"]}b.",
        scaler + b")\x81K\x01b.",
        b"}]K\x01s.",
    ):
        refused(tmp_path, b"\x80\x02" + content, "cannot be read|is not plain")


def test_numpy_is_never_given_bytes_of_a_file_as_pointers(tmp_path: Path) -> None:
    state = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85ctorch\nSize\ntR"
    dtype = b"cnumpy\ndtype\n"
    plain = dtype + text("i8") + b"\x85R(K\x03" + text("<") + state + b"\x00tb"
    fields = b"NX\x01\x00\x00\x00a\x85}" + text("a") + dtype + text("O8") + b"\x85RK\x00\x86s" + state[3:]
    with_fields = dtype + text("i8") + b"\x85R(K\x03" + text("<") + fields + b"\x00tb"
    short = b"c_codecs\nencode\n" + text("1234") + text("latin1") + b"\x86R"
    for content, words in {
        dtype + text("O8") + b"\x85R(K\x03" + text("|") + state + b"?tb.": "numpy dtype .* is refused",
        dtype + text("i4,O") + b"\x85R(K\x03" + text("<") + state + b"\x00tb.": "numpy dtype .* is refused",
        with_fields + b".": "numpy dtype .* is refused",
        array + b"(K\x01K\x01\x85ctorch\nfloat32\n\x89" + text("x") + b"tb.": "expected _Dtype",
        array + b"(K\x01K\x01\x85" + plain + b"\x89" + short + b"tb.": "no array of",
        array + b".": "cannot be read",
        b"cnumpy.core.multiarray\nscalar\n" + plain + short + b"\x86R.": "no array of",
    }.items():
        refused(tmp_path, b"\x80\x02" + content, words)
        with torch.serialization.safe_globals([np.dtype, np.ndarray]):
            refused(tmp_path, b"\x80\x02" + content, words)


def call(name: str, args: bytes) -> bytes:
    return b"c" + name.encode() + b"\n(" + args + b"tR"


def test_a_few_bytes_cannot_ask_for_any_amount_of_memory(tmp_path: Path) -> None:
    count = b"J" + struct.pack("<i", 1 << 30)
    scaled = b"ctorch\nfloat32\n(" + count + b"t(K\x00t\x89"
    repeated = call("torch._utils\n_rebuild_meta_tensor_no_storage", scaled)  # one element, 2**30 times
    through = b"cbuiltins\nbytearray\nctorch\nTensor\n(" + count + b"tN"
    doubled = call("_codecs\nencode", text("x") + text("latin1")) + text("hex")
    copied = repeated + b"ctorch\nfloat64\n" + text("cpu") + b"\x89"
    for content, words in {
        call("builtins\nbytearray", count): "expected bytes, not int",
        call("builtins\nbytes", count): "expected bytes, not int",
        call("torch._tensor\n_rebuild_from_type_v2", through): "expected bytes, not int",
        b"cbuiltins\nbytearray\nq\x00h\x00" + count + b"\x85R": "expected bytes, not int",
        b"cbuiltins\nbytearray\n" + count + b"\x85\x81": "cannot be read",
        call("_codecs\nencode", doubled): "expected str, not bytes",
        call("_codecs\nencode", text("x") + text("hex")): "is not a text encoding",
        call("builtins\nset", repeated): "expected list, not Tensor",
        call("builtins\nfrozenset", repeated): "expected list, not Tensor",
        call("collections\nCounter", repeated): "expected dict, not Tensor",
        call("collections\nOrderedDict", repeated): "expected list, not Tensor",
        call("torch._utils\n_rebuild_device_tensor_from_cpu_tensor", copied): "not callable",
    }.items():
        refused(tmp_path, b"\x80\x02" + content + b".", words)


def storage(count: bytes = b"K\x04", kind: bytes = b"ctorch\nFloatStorage\n", key: str = "0") -> bytes:
    return b"(" + text("storage") + kind + text(key) + text("cpu") + count + b"tQ"


def tensor(held: bytes, offset: bytes = b"K\x00", shape: bytes = b"K\x04\x85", stride: bytes = b"K\x01\x85") -> bytes:
    arguments = held + offset + shape + stride + b"\x89ccollections\nOrderedDict\n)R"
    return b"\x80\x02" + call("torch._utils\n_rebuild_tensor_v2", arguments) + b"."


def test_tensors_that_do_not_fit_their_bytes_are_refused(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32).tobytes()
    assert load_restricted(packed(tmp_path / "ok.pt", tensor(storage()), r0=values)).tensor().tolist() == [0, 1, 2, 3]
    minus, huge = b"J\xff\xff\xff\xff", b"\x8a\x08" + struct.pack("<q", 2**60)
    for content, words in {
        tensor(storage(b"K\x05")): "does not fit",
        tensor(storage(huge)): "does not fit|cannot be read",
        tensor(storage(key="7")): "cannot be read",
        tensor(storage(key="../../x")): "cannot be read",
        tensor(storage(kind=b"ctorch\nfloat32\n")): "cannot be read",
        tensor(storage(kind=b"ccollections\nOrderedDict\n")): "cannot be read",
        tensor(storage(), offset=b"K\x01"): "does not fit",
        tensor(storage(), offset=minus): "cannot be read",
        tensor(storage(), shape=b"K\x05\x85"): "does not fit",
        tensor(storage(), stride=b"K\x02\x85"): "does not fit",
        tensor(storage(), shape=minus + b"\x85"): "cannot be read",
        # a few bytes that ask for exabytes
        tensor(storage(), shape=huge + b"\x85", stride=b"K\x00\x85"): "does not fit",
        tensor(storage(), shape=b"K\x02K\x02\x86"): "cannot be read",
        tensor(b"N"): "cannot be read",
    }.items():
        refused(tmp_path, content, words, r0=values)


@pytest.mark.parametrize(
    "value",
    [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.ones(2, dtype=torch.complex64).conj()],
    ids=["sparse", "meta", "conjugate"],
)
def test_tensors_that_are_no_plain_values_are_refused(tmp_path: Path, value: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"file\.pt"):
        stored(tmp_path, {"a": value})


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("kind", [torch.FloatStorage, torch.UntypedStorage], ids=["typed", "untyped"])
def test_a_bare_storage_is_refused(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(CheckpointError, match=r"file\.pt cannot .* it holds a bare storage \(TypedStorage\)"):
        stored(tmp_path, {"a": [kind(4)]})


def test_broken_streams_are_refused(tmp_path: Path) -> None:
    for content in (b"", b".", b"\xff", b"\x80\x04\x93."):
        refused(tmp_path, content, "cannot be read")
    for rest in (
        *(b"", b"K\x01", b"t.", b"h\x05.", b"q\x00.", b"R.", b"b.", b"(K\x01K\x02R.", b"}(K\x01u.", b"]}\x85R."),
        *(b"}]K\x01s.", b"}(]K\x01u.", b"X\xff\xff\xff\x7fabc.", b"Q.", b"(q\x00h\x00."),
    ):
        refused(tmp_path, b"\x80\x02" + rest, "cannot be read")


def test_values_that_contain_themselves_or_are_deep_do_not_hang(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="nested too deeply, or contains itself"):
        materialize(stored(tmp_path, {"x": loop}))
    deep = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    with pytest.raises(CheckpointError, match="nested too deeply"):
        materialize(load_restricted(packed(tmp_path / "deep.pt", deep)))


PARTS = {"a": [1, (2, "x")], "o": OrderedDict(b=1), "n": np.float32(1), "s": {1}, "p": Path("a"), "z": torch.Size([1])}
REAL = pickle.dumps(PARTS, protocol=2)


@given(st.lists(st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_mutated_pickle_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(REAL)
    for at, value in changes:
        content[at] = value
    path = packed(tmp_path_factory.getbasetemp() / "mutated.pt", bytes(content))
    try:
        materialize(load_restricted(path))
    except CheckpointError as error:
        assert str(error)


# -- files -------------------------------------------------------------------------------------------------------


def test_files_that_torch_does_not_write_today_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"file\.pt cannot be read as a file of torch.save \(1\.6 or later\)"):
        load_restricted(path)
    for content in (b"", b"PK\3\4 and no more", b"{}"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"file\.pt cannot be read as a file of torch.save"):
            load_restricted(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "x")
    with pytest.raises(CheckpointError, match=r"file\.pt cannot be read as a file of torch.save"):
        load_restricted(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps([0] * 1000, protocol=2))
    with pytest.raises(CheckpointError, match="checksum of its record 'data.pkl' does not match"):
        load_restricted(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps([], protocol=2))
        archive.writestr("x/byteorder", "big")
    with pytest.raises(CheckpointError, match="other byte order"):
        load_restricted(path)


def test_checksums_of_tensors_are_verified_where_torch_wrote_them(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    value = torch.arange(1000.0)
    torch.save(value, path)
    good = path.read_bytes()
    at = good.index(value.numpy().tobytes())
    path.write_bytes(good[: at + 2001] + b"\xff" + good[at + 2002 :])
    with pytest.raises(CheckpointError, match="checksum of its record 'data/0' does not match"):
        load_restricted(path).read(torch.empty(1))
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(load_restricted(path).tensor(), value)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(torch.arange(100_000.0), path)
    found = load_restricted(path)
    os.truncate(path, 1000)
    with pytest.raises(CheckpointError, match="damaged|shorter|truncated"):
        found.tensor()
