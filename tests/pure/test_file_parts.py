"""Parts of tensors in files: what is read of one is what slicing the whole gives; pages that were written to count."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from deepspeed.client.zero.init import zero_wrapper_for_fp_tensor_constructor
from deepspeed.errors import UsageError
from deepspeed.zero.layout import Box, Place
from deepspeed.zero.module import mapped
from deepspeed.zero.module.mapped import FilePart, MappedFiles, identity_of
from deepspeed.zero.param import part_of


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "values"
    torch.arange(5 + 4096, dtype=torch.int32).numpy().tofile(path)
    return path


@st.composite
def _places(draw: st.DrawFn) -> Place:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    boxes: list[Box] = []
    for _ in range(draw(st.integers(1, 2))):
        edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        boxes.append((tuple(lo for lo, _ in edges), tuple(hi - lo for lo, hi in edges)))
    numels = [torch.Size(size).numel() for _, size in boxes]
    size = boxes[0][1] if len(boxes) == 1 else (sum(numels),)
    return Place(tuple(boxes), size, shape)


@given(_places(), st.data(), st.sampled_from([8, 64, 1 << 20]))
def test_any_range_of_any_place_is_what_slicing_gives(file: Path, place: Place, data: Any, window: int) -> None:
    numel = torch.Size(place.shape).numel()
    whole = torch.arange(5, 5 + numel, dtype=torch.int32).view(place.shape)
    expected = part_of(whole, place).reshape(-1)
    lo, hi = sorted(data.draw(st.tuples(st.integers(0, len(expected)), st.integers(0, len(expected)))))
    out = torch.full((hi - lo,), -1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "_WINDOW_BYTES", window)
        patch.setattr(mapped, "_CLOSE_BYTES", window // 8)
        FilePart(str(file), (), 20, torch.int32, place.shape).read(out, lo, place)
    assert torch.equal(out, expected[lo:hi].float())


def test_a_file_that_ends_early_is_named(file: Path) -> None:
    part = FilePart(str(file), (), 4000 * 4, torch.int32, (200,))
    with pytest.raises(UsageError, match="values ends early"):
        part.read(torch.empty(200), 0)


@pytest.mark.parametrize("by", ["zero.Init", "the default device"])
def test_values_are_read_in_host_memory_whatever_the_device_of_new_tensors(
    file: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = torch.empty(8)
    if by == "zero.Init":
        away = zero_wrapper_for_fp_tensor_constructor(torch.empty, None, target_device=torch.device("meta"))
        monkeypatch.setattr(torch, "empty", away)
    with torch.device("meta") if by == "the default device" else contextlib.nullcontext():
        FilePart(str(file), (), 4 * 4, torch.int32, (8,)).read(out, 0)
    assert out.tolist() == [*range(4, 12)]


def test_a_mapping_is_found_until_somebody_writes_to_it(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.randn(64, 64), "b": torch.randn(3)}, path)
    state = torch.load(path, mmap=True)
    for name in "ab":
        part = MappedFiles().part_of(state[name])
        assert part is not None and part.path == str(path) and part.identity == identity_of(str(path))
        out = torch.empty(state[name].numel())
        part.read(out, 0)
        assert torch.equal(out.view(state[name].shape), state[name])
    assert MappedFiles().part_of(state["a"].t()) is None, "not in the order of the file"
    assert MappedFiles().part_of(state["a"].clone()) is None
    state["a"][0, 0] = 1
    assert MappedFiles().part_of(state["a"]) is None


def test_a_file_that_another_one_replaced_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(torch.randn(64), path)
    values = torch.load(path, mmap=True)
    path.rename(tmp_path / "before.pt")
    torch.save(torch.randn(64), path)
    part = MappedFiles().part_of(values)
    assert part is not None and part.path == str(tmp_path / "before.pt")
    (tmp_path / "before.pt").unlink()
    assert MappedFiles().part_of(values) is None


def test_a_view_that_negates_later_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.randn(64), "b": torch.randn(64, dtype=torch.complex64)}, path)
    state = torch.load(path, mmap=True)
    views = [torch._neg_view(state["a"]), state["b"].conj()]
    assert all(v.is_contiguous() and MappedFiles().part_of(v) is None for v in views)
    assert MappedFiles().part_of(state["a"]) is not None and MappedFiles().part_of(state["b"]) is not None


def test_memory_beyond_the_end_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.randn(1 << 12), "b": torch.randn(1 << 12)}, path)
    state = torch.load(path, mmap=True)
    os.truncate(path, path.stat().st_size * 2 // 3)
    assert MappedFiles().part_of(state["a"]) is not None
    for _ in "ab":
        with pytest.raises(UsageError, match=r"weights.pt ends early"):
            MappedFiles().part_of(state["b"])
        state["a"][0] = 1  # the pages of a mapping that was written to end there, too
