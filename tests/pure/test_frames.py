"""Frames amid output, and lines of several hosts on one terminal."""

import json

import pytest
from hypothesis import given, strategies as st

from deepspeed.launcher.fanout import FrameReader
from deepspeed.launcher.node.loop import MARK

FRAME = {"kind": "verdict", "status": 1, "text": "line\nline\n\u00e9"}
ENCODED = MARK + json.dumps(FRAME).encode() + b"\n"


@given(
    st.lists(st.one_of(st.binary(max_size=20).filter(lambda data: MARK[:1] not in data), st.just(None))),
    st.integers(1, 50),
)
def test_frames_are_found_however_the_stream_is_cut(parts: list[bytes | None], size: int) -> None:
    stream = b"".join(ENCODED if part is None else part for part in parts)
    reader, output, frames = FrameReader(b""), b"", []
    for start in range(0, len(stream), size):
        shown, new = reader.feed(stream[start : start + size])
        output += shown
        frames += new
    wanted = b"".join(part for part in parts if part is not None)
    assert output + reader.end() in (wanted, wanted + b"\n")
    assert frames == [FRAME] * parts.count(None)


@pytest.mark.parametrize(
    "data", [MARK + b"no json\n", MARK + b"[1]\n", MARK + b'{"other": 1}\nmore\n', MARK[:4] + b"\n", b"a\x1e\x1edeep\n"]
)
def test_what_only_looks_like_a_frame_is_output(data: bytes) -> None:
    reader = FrameReader(b"")
    output, frames = reader.feed(data)
    assert output + reader.end() == data and frames == []


@given(st.binary(max_size=60), st.integers(1, 10))
def test_prefixing_adds_prefixes_and_nothing_else(data: bytes, size: int) -> None:
    data = data.replace(b"h: ", b"")
    reader = FrameReader(b"h: ")
    output = b"".join(reader.feed(data[start : start + size])[0] for start in range(0, len(data), size)) + reader.end()
    assert output.replace(b"h: ", b"") in (data, data + b"\n")


def test_lines_and_progress_bars_get_the_prefix() -> None:
    reader = FrameReader(b"h: ")
    assert reader.feed(b"one\ntw") == (b"h: one\n", [])
    assert reader.feed(b"o\r\n\r 10%") == (b"h: two\r\nh: \r", [])
    assert reader.feed(b"\r 20%" + ENCODED) == (b"h:  10%\r", [FRAME])
    assert reader.feed(b"!\r") == (b"", [])  # a newline may follow
    assert reader.end() == b"h:  20%!\r\n"
    assert len(reader.feed(b"x" * 100_000)[0]) > 100_000
