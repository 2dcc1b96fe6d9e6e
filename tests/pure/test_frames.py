"""Frames amid output, and lines of several hosts on one terminal."""

import pytest
from hypothesis import given, strategies as st

from deepspeed.launcher.cluster.frames import MARK, FrameFilter, LinePrefixer, encode_frame

FRAME = {"event": "verdict", "status": 1, "text": "line\nline\n\u00e9"}


@given(
    st.lists(st.one_of(st.binary(max_size=20).filter(lambda data: MARK[:1] not in data), st.just(None))),
    st.integers(1, 50),
)
def test_frames_are_found_however_the_stream_is_cut(parts: list[bytes | None], size: int) -> None:
    stream = b"".join(encode_frame(FRAME) if part is None else part for part in parts)
    frames, output, found = FrameFilter(), b"", []
    for start in range(0, len(stream), size):
        shown, new = frames.feed(stream[start : start + size])
        output += shown
        found += new
    assert output + frames.end() == b"".join(part for part in parts if part is not None)
    assert found == [FRAME] * parts.count(None)


@pytest.mark.parametrize(
    "data", [MARK + b"no json\n", MARK + b"[1]\n", MARK + b'{"other": 1}\nmore', MARK[:4], b"a\x1e\x1edeep"]
)
def test_what_only_looks_like_a_frame_is_output(data: bytes) -> None:
    frames = FrameFilter()
    output, found = frames.feed(data)
    assert output + frames.end() == data and found == []


@given(st.binary(max_size=60), st.integers(1, 10))
def test_prefixing_adds_prefixes_and_nothing_else(data: bytes, size: int) -> None:
    data = data.replace(b"h: ", b"")
    lines = LinePrefixer(b"h: ")
    output = b"".join(lines.feed(data[start : start + size]) for start in range(0, len(data), size)) + lines.end()
    assert output.replace(b"h: ", b"") in (data, data + b"\n")


def test_lines_and_progress_bars_get_the_prefix() -> None:
    lines = LinePrefixer(b"h: ")
    assert lines.feed(b"one\ntw") == b"h: one\n"
    assert lines.feed(b"o\r\n\r 10%") == b"h: two\r\nh: \r"
    assert lines.feed(b"\r 20%") == b"h:  10%\r"
    assert lines.end() == b"h:  20%\n"
    assert len(lines.feed(b"x" * 100_000)) > 100_000
