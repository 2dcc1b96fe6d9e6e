"""Native builds: one good library per cache whatever happens while it is built, and one clear reason where there is
none.
"""

import ctypes
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed.accelerator.native import build, builders, cache, compiler
from deepspeed.accelerator.native.spec import OpSpec
from deepspeed.errors import BuildError, DeepSpeedError
from tests.budget.source import ROOT
from tests.harness.compilers import GXX
from tests.harness.logs import logged
from tests.harness.patience import slowdown, too_long

pytestmark = [pytest.mark.skipif(GXX is None, reason="needs a C++ compiler"), pytest.mark.usefixtures("native_cache")]

CHILD = """
import sys
from pathlib import Path
from deepspeed.accelerator.native.build import load
from deepspeed.accelerator.native.spec import OpSpec
op = OpSpec("tiny", ("tiny.cpp",), root=Path(sys.argv[1]))
sys.stdout.write(str(load(op).add(2, 3)))
assert "torch" not in sys.modules
"""


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What was logged."""
    with logged(set_level=logging.INFO) as found:
        yield found


@pytest.fixture
def wrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make CXX a script that counts compilations, then runs the given shell lines, then the real compiler."""

    def make(on_compile: str = ":") -> Path:
        script, count = tmp_path / "fake-c++", tmp_path / "count"
        script.write_text(
            f'#!/bin/sh\ncase " $* " in *\' -c \'*) echo once >> {count}\n{on_compile}\n;; esac\nexec {GXX} "$@"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return count

    return make


def _start(op: OpSpec) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, str(op.root)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(child: subprocess.Popen[str]) -> str:
    out, err = child.communicate(timeout=90)
    assert child.returncode == 0, err
    return out


def _wait_for(path: Path) -> None:
    limit = time.monotonic() + 60
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < limit, f"{path} did not appear"
        time.sleep(0.01)


def _files(tmp_path: Path, ending: str) -> list[Path]:
    return sorted((tmp_path / "cache/deepspeed").glob(f"*{ending}"))


def test_builds_once_and_then_reads(tiny: OpSpec, tmp_path: Path, wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no compiler by then."""
    count = wrap()
    assert build.load(tiny).add(2, 3) == 5
    build.load.cache_clear()
    assert build.load(tiny).add(2, 3) == 5 and count.read_text().split() == ["once"]
    (library,) = _files(tmp_path, ".so")
    assert {path.suffix for path in (tmp_path / "cache/deepspeed").iterdir()} == {".so", ".json", ".lock"}
    build.load.cache_clear()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    assert build.build(tiny) == library and build.load(tiny).add(2, 3) == 5


def test_everything_that_matters_is_in_the_name(
    tiny: OpSpec, tmp_path: Path, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.build(tiny)
    (tmp_path / "src/tiny.h").write_text("#define OFFSET 10\n")
    second = build.build(tiny)
    assert first != second and ctypes.CDLL(str(second)).add(2, 3) == 15
    names = {first, second, build.build(replace(tiny, flags=("-DX",)))}
    wrap()
    names.add(build.build(tiny))
    monkeypatch.setattr(build, "torch_build", lambda: {"version": "9.9"})
    names.add(build.build(tiny))
    assert len(names) == 5 and len(_files(tmp_path, ".so")) == 5


def test_included_files_count(tiny: OpSpec, tmp_path: Path) -> None:
    (tmp_path / "src/deep").mkdir()
    (tmp_path / "src/tiny.h").write_text(
        '#define OFFSET ONE\n  # include "deep/one.h"\n#include <vector>\n#include "tiny.h"\n'
    )
    (tmp_path / "src/deep/one.h").write_text('#pragma once\n#include "../deep/two.h"\n')
    (tmp_path / "src/deep/two.h").write_text("#pragma once\n#define ONE 1\n")
    (tmp_path / "src/tiny.h").write_text("#pragma once\n" + (tmp_path / "src/tiny.h").read_text())
    assert [path.name for path in tiny.inputs()] == ["tiny.cpp", "tiny.h", "one.h", "two.h"]
    first = tiny.stem()
    (tmp_path / "src/deep/two.h").write_text("#pragma once\n#define ONE 2\n")
    assert tiny.stem() != first and build.load(tiny).add(2, 3) == 7


def test_eight_processes_compile_once(tiny: OpSpec, wrap: Any) -> None:
    count = wrap("sleep 0.5")
    children = [_start(tiny) for _ in range(8)]
    assert [_finish(child) for child in children] == ["5"] * 8
    assert count.read_text().split() == ["once"]


def test_killed_in_mid_build(tiny: OpSpec, tmp_path: Path, wrap: Any) -> None:
    """The next build neither waits for the dead one nor uses what it left, and cleans up after it."""
    pid = tmp_path / "pid"
    wrap(f"if [ ! -e {pid} ]; then echo $$ > {pid}; printf half > {tmp_path}/half; exec sleep 60; fi")
    child = _start(tiny)
    try:
        _wait_for(pid)
        assert len(list((tmp_path / "cache/deepspeed").glob(".tiny@*"))) == 1
        child.kill()
        child.communicate(timeout=60)
        begin = time.monotonic()
        assert build.load(tiny).add(2, 3) == 5 and not too_long(begin, 10)
    finally:
        if pid.exists():
            os.kill(int(pid.read_text()), signal.SIGKILL)
    assert not list((tmp_path / "cache/deepspeed").glob(".tiny@*"))


def test_a_damaged_library_is_rebuilt(tiny: OpSpec, wrap: Any) -> None:
    count = wrap()
    library = build.build(tiny)
    note, whole = library.with_suffix(".json"), library.read_bytes()
    harms = {
        "truncated": (library, whole[: len(whole) // 2]), "altered": (library, whole[:-1] + b"x"),
        "empty": (library, b""), "no note": (note, None), "note is not JSON": (note, b'{"size": 1'),
        "note is a list": (note, b"[]"),
    }  # fmt: skip
    for compiled, (harm, (path, content)) in enumerate(harms.items(), start=2):
        path.unlink()  # what has been loaded keeps its file
        if content is not None:
            path.write_bytes(content)
        build.load.cache_clear()
        assert build.load(tiny).add(2, 3) == 5, harm
        assert count.read_text().split() == ["once"] * compiled and library.read_bytes() == whole, harm


def test_a_whole_library_that_does_not_load_is_built_again(tiny: OpSpec, wrap: Any, lines: list[str]) -> None:
    count = wrap()
    library = build.build(tiny)
    library.write_bytes(b"of another machine")
    note = library.with_suffix(".json")
    note.write_text(json.dumps({"size": library.stat().st_size, "sha256": cache._sha256(library)}))
    assert build.load(tiny).add(2, 3) == 5 and count.read_text().split() == ["once"] * 2
    assert any("does not load" in line for line in lines)


def test_the_compilers_first_error_is_the_reason(tiny: OpSpec, tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "src/tiny.cpp").write_text("int ok;\nint broken = nothing;\nint worse = nowhere;\n")
    with pytest.raises(BuildError, match=r"op tiny: .* fails with status 1: .*tiny.cpp:2:.*error: .*nothing") as caught:
        build.load(tiny)
    assert isinstance(caught.value, DeepSpeedError) and isinstance(caught.value, RuntimeError)
    for _ in range(2):
        assert build.try_load(replace(tiny, instead="a slower loop")) is None
    assert (
        len(lines) == 1
        and "native op tiny is not available, a slower loop runs instead:" in lines[0]
        and "error:" in lines[0]
    )


def test_unresolved_library_is_a_link_error(tiny: OpSpec) -> None:
    with pytest.raises(BuildError, match=r"cannot find -lnot_there|not_there"):
        build.load(replace(tiny, libraries=("not_there",)))


def test_missing_and_broken_compilers(tiny: OpSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        with pytest.raises(BuildError) as caught:
            build.load(tiny)
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert "none of c++, g++, clang++ is on PATH; install g++" in reason()
    monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
    assert "CXX names '/nowhere/g++'" in reason()
    script = tmp_path / "broken"
    for text, expected in {
        "#!/bin/sh\necho 'libisl.so: No such file' >&2\nexit 127\n": r"status 127: libisl.so: No such file",
        "#!/bin/sh\nexit 0\n": "ended well but made no library",
        "not a program": "cannot be started",
        "#!/bin/sh\nkill -9 $$\n": "status -9",
    }.items():
        script.write_text(text)
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        assert expected in reason()


def test_a_compiler_that_hangs_is_stopped(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(BuildError, match="took more than 0 s"):
        compiler.run_tool(["sh", "-c", "sleep 30 & sleep 30"], limit_s=0.2)
    assert not too_long(begin, 5)


def _two_sources(tiny: OpSpec) -> OpSpec:
    (tiny.folder() / "more.cpp").write_text('extern "C" int two() { return 2; }\n')
    return replace(tiny, sources=("tiny.cpp", "more.cpp"))


@pytest.mark.parametrize(("jobs", "ninja"), [("1", True), ("20", True), ("0", True), ("many", True), ("1", False)])
def test_max_jobs_limits_how_many_sources_are_compiled_at_once(
    tiny: OpSpec, monkeypatch: pytest.MonkeyPatch, jobs: str, *, ninja: bool
) -> None:
    """Ninja is told the number, if it is one; what does without ninja compiles one after the other."""
    commands: list[list[str]] = []
    run = compiler.run_tool

    def spy(command: list[str], *, limit_s: float) -> tuple[int, str]:
        commands.append(command)
        return run(command, limit_s=limit_s)

    if not ninja:
        monkeypatch.setattr(compiler, "find_ninja", lambda: None)
    found = compiler.find("cpp")
    monkeypatch.setattr(build, "checked_compiler", lambda _: found)
    monkeypatch.setattr(compiler, "run_tool", spy)
    monkeypatch.setenv("MAX_JOBS", jobs)
    assert build.load(_two_sources(tiny)).two() == 2
    assert len(commands) == (2 if ninja else 3)
    if ninja:
        assert commands[0][3:] == (["-j", jobs] if jobs in ("1", "20") else [])


def test_a_broken_ninja_does_not_end_a_build(tiny: OpSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "ninja"
    broken.write_text("#!/bin/sh\necho 'ninja: error: loading build.ninja: broken'\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(compiler, "find_ninja", lambda: str(broken))
    assert build.load(_two_sources(tiny)).two() == 2


def test_the_first_error_of_several_sources_is_the_compilers_own(tiny: OpSpec) -> None:
    op = _two_sources(tiny)
    (op.folder() / "more.cpp").write_text("int ok;\nint broken = nothing;\n")
    with pytest.raises(BuildError, match=r"op tiny: .* fails with status 1: .*more.cpp:2:.*error: .*nothing"):
        build.load(op)


def test_all_compilers_end_with_a_build_that_is_stopped(
    tiny: OpSpec, tmp_path: Path, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two, as several sources are compiled at once."""
    started = tmp_path / "pids"
    wrap(f'case "$*" in *" -c "*) echo $$ >> {started}; exec sleep 3600;; esac')
    wait = subprocess.Popen.wait

    def until_both_have_begun(child: Any, timeout: float | None = None) -> int:
        if timeout != compiler.COMPILE_LIMIT_S:
            return wait(child, timeout)
        begun = time.monotonic()
        while not started.exists() or started.read_text().count("\n") < 2:
            assert not too_long(begun, 60)
            time.sleep(0.02)
        return wait(child, 0.0)

    monkeypatch.setattr(subprocess.Popen, "wait", until_both_have_begun)
    with pytest.raises(BuildError, match="took more than 900 s"):
        build.load(_two_sources(tiny))
    pids = started.read_text().split()
    begin = time.monotonic()
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and not too_long(begin, 5):
        time.sleep(0.05)
    assert pids and not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_those_who_waited_for_a_failure_do_not_repeat_it(
    tiny: OpSpec, tmp_path: Path, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    count = wrap(f"while [ ! -e {go} ]; do sleep 0.02; done; echo 'error: no luck' >&2; exit 1")
    said: list[str] = []
    asking: list[object] = []
    acquire = cache.BuildLock._acquire

    def asks(lock: cache.BuildLock, handle: int, limit_s: float) -> None:
        asking.append(lock)
        acquire(lock, handle, limit_s)

    monkeypatch.setattr(cache.BuildLock, "_acquire", asks)

    def attempt() -> None:
        with pytest.raises(BuildError) as caught:
            build.build(tiny)
        said.append(str(caught.value))

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    while len(asking) < len(threads) and not too_long(begun, 20):
        time.sleep(0.01)
    go.touch()
    for thread in threads:
        thread.join(20)
    assert len(said) == 4 and all("error: no luck" in line for line in said)
    assert count.read_text().split() == ["once"]
    assert "error: no luck" in build.last_failure(tiny, compiler.find("cpp"))
    wrap()
    # the failure is remembered for those who waited, not for those who come later
    assert build.build(tiny).is_file() and build.last_failure(tiny, compiler.find("cpp")) == ""


def test_a_stopped_owner_is_not_waited_for_without_end(tmp_path: Path, lines: list[str]) -> None:
    lock = cache.BuildLock(tmp_path, "tiny")
    with lock.owned():
        begin = time.monotonic()
        with lock.owned(limit_s=0.3):
            pass
    assert time.monotonic() - begin > 0.2 and not too_long(begin, 5) and "building without it" in lines[-1]


def test_a_folder_that_cannot_be_written(
    tiny: OpSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "below"))
    assert build.try_load(tiny) is None and build.built(tiny) is None
    assert len(lines) == 1 and "runs instead" in lines[0] and "set TORCH_EXTENSIONS_DIR" in lines[0]


def test_a_user_without_a_home(tiny: OpSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(BuildError, match="no home .*set TORCH_EXTENSIONS_DIR"):
        build.load(tiny)
    assert build.built(tiny) is None and "no home" in build.last_failure(tiny, compiler.find("cpp"))


def test_a_folder_that_takes_no_more_says_the_way_out(tiny: OpSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is there already and can be had."""
    library = build.build(tiny)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(cache.tempfile, "mkdtemp", refuse)
    assert build.build(tiny) == library
    with pytest.raises(BuildError, match="cannot be built in .*set TORCH_EXTENSIONS_DIR"):
        build.build(replace(tiny, flags=("-DX",)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_still_read(tiny: OpSpec) -> None:
    library = build.build(tiny)
    library.parent.chmod(0o555)
    try:
        assert build.build(tiny) == library
        with pytest.raises(BuildError, match="set TORCH_EXTENSIONS_DIR"):
            build.build(replace(tiny, flags=("-DX",)))
    finally:
        library.parent.chmod(0o755)


def test_a_shipped_library_is_preferred_while_it_fits(
    tiny: OpSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = build.ship(tiny, tmp_path / "prebuilt")
    monkeypatch.setattr(cache, "SHIPPED", tmp_path / "prebuilt")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        assert build.shipped(tiny) == shipped and build.load(tiny).add(2, 3) == 5
    assert not _files(tmp_path, ".so")
    build.load.cache_clear()
    (tmp_path / "src/tiny.h").write_text("#define OFFSET 10\n")
    assert build.load(tiny).add(2, 3) == 15 and build.shipped(tiny) is None


class TinyBuilder(builders.TorchCPUOpBuilder):
    """A client's own op."""

    NAME, BUILD_VAR = "mine", "DS_BUILD_MINE"
    folder = Path()

    def sources(self) -> list[str]:
        """One file, by its absolute path."""
        return [str(self.folder / "tiny.cpp")]

    def include_paths(self) -> list[str]:
        """Where its header is."""
        return [str(self.folder)]

    def cxx_args(self) -> list[str]:
        """As clients write it."""
        return [self.cpu_arch(), self.simd_width(), "-DMINE"]


def test_builder_interface(tiny: OpSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.setattr(TinyBuilder, "folder", tiny.root)
    mine = TinyBuilder()
    assert mine.absolute_name() == "deepspeed.ops.mine" and mine.is_compatible() and not mine.is_shipped()
    assert mine.state().word == "on first use"
    assert mine.load().add(2, 3) == 5 and mine.jit_load(verbose=False).add(2, 3) == 5
    assert mine.state() == ("built", str(_files(tmp_path, ".so")[0]))
    assert mine.has_function("sqrt", ["m"]) and not mine.has_function("no_such_function", [])
    assert mine.command_exists([GXX or "", "nothing"]) and not mine.command_exists("no-such-program")
    (tmp_path / "src/tiny.cpp").write_text("int broken = nothing;\n")
    build.load.cache_clear()
    lines.clear()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        assert not mine.is_compatible(verbose=True) and "no C++ compiler" in lines[0]
        assert mine.state().word == "fallback" and "no C++ compiler" in mine.state().detail
        with pytest.raises(BuildError, match="mine is not available: no C"):
            mine.load()
    with pytest.raises(BuildError, match="nothing"):
        mine.load()
    assert mine.state().word == "fallback" and "nothing" in mine.state().detail


def test_builders_of_this_package() -> None:
    named = {name: each.BUILD_VAR for name, each in builders.ALL_OPS.items()}
    assert set(named) == set(builders.compatible_ops) == set(builders.installed_ops)
    assert (
        named["async_io"] == "DS_BUILD_AIO"
        and named["cpu_adam"] == "DS_BUILD_CPU_ADAM"
        and len(set(named.values())) == len(named)
    )
    gds = builders.GDSBuilder()
    assert not gds.is_compatible() and "async_io" in gds.why_not()
    with pytest.raises(BuildError, match="gds is not available"):
        gds.load()
    assert all(state.word in ("built", "on first use", "fallback") for state in builders.states(limit_s=5).values())


def test_a_report_asks_a_broken_compiler_once(tiny: OpSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(builders.OpBuilder):
        NAME, SPEC = "mine", tiny

    script, count = tmp_path / "fake-c++", tmp_path / "count"
    script.write_text(f"#!/bin/sh\necho once >> {count}\nsleep 30\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(builders, "ALL_OPS", {"a": Mine(), "b": Mine()})
    begin = time.monotonic()
    found = builders.states(limit_s=0.5 * slowdown())
    assert not too_long(begin, 5) and count.read_text().split() == ["once"]
    assert all(state.word == "fallback" and "took more than" in state.detail for state in found.values())
