"""One command on many hosts: output, statuses, filters, bad input, and that Ctrl-C leaves nothing behind. ssh is a
stand-in.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, strategies as st

from deepspeed.launcher import ds_ssh
from deepspeed.launcher.fanout import FrameReader
from deepspeed.launcher.node.loop import MARK
from deepspeed.launcher.runners import ssh_program
from tests.harness.patience import too_long

ROOT = Path(__file__).resolve().parents[2]
# As sshd does: the words behind the host are one text for the user's shell. Host "dead" cannot be reached.
FAKE_SSH = """#!/bin/sh
test "$1 $2 $3 $4" = "-o BatchMode=yes -o ConnectTimeout=10" || exit 99
shift 4
host=$1; shift
test "$host" = dead && { echo "no route to host" >&2; exit 255; }
export FAKE_HOST=$host SHELL=/bin/sh
exec /bin/sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for ssh in DS_SSH, and the folder with hostfile ``hosts``."""
    program = tmp_path / "ssh"
    program.write_text(FAKE_SSH)
    program.chmod(0o755)
    (tmp_path / "hosts").write_text("b slots=2\n# note\na slots=4\ndead slots=1\nc slots=1\n")
    monkeypatch.setenv("DS_SSH", str(program))
    return tmp_path


def _run(folder: Path, *argv: str) -> int:
    return ds_ssh.main(["-f", str(folder / "hosts"), *argv])


def test_output_is_prefixed_and_split(ssh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(ssh, "-e", "dead", "echo", "on $FAKE_HOST; echo 'it''s' \"2>&1\"; echo bad >&2; printf no-newline") == 0
    out, err = capsys.readouterr()
    said = [f"{host}: {words}" for host in "abc" for words in (f"on {host}", "its 2>&1", "no-newline")]
    assert sorted(out.splitlines()) == sorted(said)
    assert sorted(err.splitlines()) == [f"{host}: bad" for host in "abc"]


def test_first_other_status_in_host_order(ssh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # b, first in the file, fails last in time
    command = "case $FAKE_HOST in b) sleep 0.3; exit 3;; a) exit 0;; c) exit 7;; esac"
    assert _run(ssh, command) == 3
    err = capsys.readouterr().err
    assert "dead: no route to host" in err
    assert "ds_ssh: 3 of 4 hosts failed: b (exit 3), dead (not reached, or exit 255), c (exit 7)" in err
    assert _run(ssh, "-i", "dead@a", "true") == 255
    assert _run(ssh, "--include", "a@c", "--", "true") == 0


def test_hosts_run_at_the_same_time(ssh: Path) -> None:
    start = time.monotonic()
    assert _run(ssh, "-e", "dead", "sleep 1") == 0
    assert not too_long(start, 2.5)


def test_standard_input_is_empty(ssh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(ssh, "-i", "a", "cat; echo end") == 0
    assert capsys.readouterr().out == "a: end\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("-f", "{folder}/none", "true"), "none cannot be read (No such file or directory)"),
        (("-f", "{folder}", "true"), "cannot be read (Is a directory)"),
        (("-f", "{folder}/binary", "true"), "cannot be read"),
        (("-f", "{folder}/bad", "true"), "line 1 is 'a'"),
        (("-f", "{folder}/hosts", "-i", "z", "true"), "names host 'z'"),
        (("-f", "{folder}/hosts", "-e", "a@b@c@dead", "true"), "leaves no host"),
        (("-f", "{folder}/hosts", "-i", "a", "-e", "b", "true"), "use one of them"),
    ],
)
def test_bad_input_is_a_sentence_and_status_2(
    ssh: Path, argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (ssh / "binary").write_bytes(b"\xff\xfe\x00")
    (ssh / "bad").write_text("a\n")
    assert ds_ssh.main([word.format(folder=ssh) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ds_ssh: ") and said in err and err.count("\n") == 1


def test_no_command_and_no_program(
    ssh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        ds_ssh.main(["--"])
    monkeypatch.setenv("DS_SSH", "no-such-ssh -v")
    assert _run(ssh, "true") == 2
    wanted = "cannot start no-such-ssh: No such file or directory; install an ssh client, or name another program"
    assert wanted in capsys.readouterr().err
    monkeypatch.setenv("DS_SSH", "sh -x")
    assert ssh_program() == ("sh", "-x")


def test_more_hosts_than_processes_at_a_time(
    ssh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ds_ssh, "FANOUT", 2)
    hosts = [f"h{number}" for number in range(5)]
    assert ds_ssh.Fleet(hosts, "echo $FAKE_HOST").run() == dict.fromkeys(hosts, 0)
    assert sorted(capsys.readouterr().out.splitlines()) == [f"{host}: {host}" for host in hosts]


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_what_the_host_runs_ends_with_the_connection(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    command = [shutil.which(shell) or shell, "-c", ds_ssh.remote_command("sleep 300; sleep 300")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    started = _children(process.pid, 1)
    process.stdin.close()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert psutil.wait_procs(started, timeout=30)[1] == []


def _children(parent: int, wanted: int) -> list[psutil.Process]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = [p for p in psutil.Process(parent).children(recursive=True) if p.name() == "sleep"]
        if len(found) == wanted:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{wanted} commands did not start")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_ds_ssh_ends_the_commands(ssh: Path, sent: signal.Signals) -> None:
    options = ["-f", str(ssh / "hosts"), "-e", "dead"]
    process = subprocess.Popen(
        [sys.executable, "-m", "deepspeed.launcher.ds_ssh", *options, "sleep 300; sleep 300"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        started = _children(process.pid, 3)
        process.send_signal(sent)
        _, err = process.communicate(timeout=60)
        assert process.returncode == (130 if sent == signal.SIGINT else -sent), err
        assert psutil.wait_procs(started, timeout=30)[1] == []
    finally:
        process.kill()
        process.wait()


# -- frames ---------------------------------------------------------------------------------------------------------
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
