"""``ds_checkpoint``: damage has a name, differences are found, nothing is unpickled, and wrong usage is one
sentence.
"""

import json
import os
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.foreign.rewrite import write_checkpoint
from deepspeed.checkpoint.foreign.unpickle import save_pickled
from deepspeed.checkpoint.format.checksum import crc32c
from deepspeed.checkpoint.format.folders import MANIFEST
from deepspeed.checkpoint.format.manifest import Box, Manifest
from deepspeed.checkpoint.format.plain import encode
from deepspeed.checkpoint.load.reader import read_manifest
from deepspeed.config.model.values import byte_count
from deepspeed.tools.checkpoint.cli import main
from deepspeed.tools.checkpoint.info import scan, unsafe
from deepspeed.tools.checkpoint.verify import verify
from tests.pure.checkpoint_samples import CONFIG, checkpoint, sample

DATA = "rank_00000.bin"


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Status, output and errors of the command."""

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(a) for a in args])
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return status, out, err

    return call


def rewrite(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_bytes(manifest.to_bytes(crc32c))


def edited(folder: Path, key: tuple[str, str], boxes: tuple[Box, ...]) -> None:
    manifest = read_manifest(folder)
    entry = manifest.entries[key]
    manifest.entries[key] = type(entry)(entry.state, entry.name, entry.dtype, entry.shape, boxes)
    rewrite(folder, manifest)


# --- verify ---


def test_a_whole_checkpoint_passes_by_either_path(tmp_path: Path, run: Run) -> None:
    folder = checkpoint(tmp_path)
    for path in (tmp_path, folder):
        status, out, _ = run("verify", path)
        assert status == 0 and out.startswith(f"ok {folder}: ")


def test_every_flipped_byte_is_found_and_its_tensor_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    content = (folder / DATA).read_bytes()
    owners = [(b, e) for e in read_manifest(folder).entries.values() for b in e.boxes]
    for at in range(0, len(content), 61):
        (folder / DATA).write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        (owner,) = [e for b, e in owners if b.offset <= at < b.offset + b.extent]
        (wrong,) = verify(folder)
        assert wrong.startswith(f"{owner.state} of {owner.name}: ") and f"{DATA} is damaged between" in wrong


def test_all_damaged_tensors_are_named_at_once(tmp_path: Path, run: Run) -> None:
    folder = checkpoint(tmp_path)
    content = bytearray((folder / DATA).read_bytes())
    for key in (("master", "l1.bias"), ("optim.exp_avg", "emb.weight")):
        content[read_manifest(folder).entries[key].boxes[0].offset] ^= 1
    (folder / DATA).write_bytes(content)
    status, out, _ = run("verify", tmp_path)
    assert status == 1 and "master of l1.bias" in out and "optim.exp_avg of emb.weight" in out


def test_a_cut_file_and_a_missing_one_are_damage(tmp_path: Path) -> None:
    """The missing one names all that it held."""
    folder = checkpoint(tmp_path)
    content = (folder / DATA).read_bytes()
    for kept in (0, 100, -1):
        (folder / DATA).write_bytes(content[:kept])
        wrong = verify(folder)
        assert f"has {len(content[:kept])} bytes, not {len(content)}" in wrong[0]
        assert any(f"{DATA} is cut" in sentence for sentence in wrong)
    (folder / DATA).unlink()
    wrong = verify(folder)
    assert len(wrong) == len(read_manifest(folder).entries)
    assert any(w.startswith("master of emb.weight") and "No such file" in w for w in wrong)


def test_a_file_that_holds_nothing_and_is_missing_is_damage(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    manifest = read_manifest(folder)
    manifest.files["rank_00001.bin"] = 0
    rewrite(folder, manifest)
    (wrong,) = verify(folder)
    assert "rank_00001.bin is missing" in wrong


def test_elements_stored_twice_or_never_are_damage(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (box,) = read_manifest(folder).entries["master", "l1.bias"].boxes
    edited(folder, ("master", "l1.bias"), (Box(DATA, box.offset, box.extent, 0, 5, box.crcs),))
    assert "master of l1.bias: manifest.json: elements 5 to 7 of 7: is missing" in verify(folder)
    edited(folder, ("master", "l1.bias"), (box, box))
    wrong = verify(folder)
    assert "master of l1.bias: manifest.json: elements 0 to 7 of 7: is stored 2 times" in wrong
    edited(folder, ("master", "l1.bias"), (Box("other.bin", box.offset, box.extent, 0, 7, box.crcs),))
    assert any("other.bin" in sentence for sentence in verify(folder))


def test_a_damaged_manifest_is_damage(tmp_path: Path, run: Run) -> None:
    folder = checkpoint(tmp_path)
    content = (folder / MANIFEST).read_bytes()
    for at in range(0, len(content), 97):
        (folder / MANIFEST).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert run("verify", folder)[0] == 1


def test_damaged_16_bit_weights_of_the_reference_layout_are_found(tmp_path: Path, run: Run) -> None:
    """Of which every one has a master, so that nothing here loads them."""
    checkpoint(tmp_path / "a")
    assert run("export", tmp_path / "a", tmp_path / "b", "--format", "deepspeed")[0] == 0
    assert run("verify", tmp_path / "b")[0] == 0
    victim = tmp_path / "b" / "global_step3" / "mp_rank_00_model_states.pt"
    weight = sample().tensors["master", "l1.weight"].bfloat16()
    content = victim.read_bytes()
    at = content.index(weight.view(torch.uint8).numpy().tobytes())
    victim.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    status, out, _ = run("verify", tmp_path / "b")
    assert status == 1 and out.startswith("DAMAGED") and victim.name in out


def test_what_is_only_not_read_here_is_not_called_damaged(tmp_path: Path, run: Run) -> None:
    state = {"module": {}, "buffer_names": [], "global_steps": 1, "param_shapes": None, "mine": Fraction(1, 3)}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    status, out, _ = run("verify", tmp_path)
    assert status == 1 and out.startswith("CANNOT READ") and "fractions.Fraction" in out


# --- info ---


def test_info_tells_totals_counters_and_tensors(tmp_path: Path, run: Run) -> None:
    checkpoint(tmp_path)
    status, out, _ = run("info", tmp_path, "--tensors")
    assert status == 0
    told = ("global_steps 3", "2 ranks, trained in bfloat16", "ZeRO 2", "AdamW, 2 groups", "head.weight = emb.weight")
    assert [words for words in told if words not in out] == []
    first, *others = [" ".join(line.split()) for line in out.splitlines() if line.startswith("master")]
    assert first == "master float32 5 170 680 B" and "master float32 13x6 emb.weight" in others


def test_info_says_where_the_scripts_optimizer_took_the_place_of_the_configured_one(tmp_path: Path, run: Run) -> None:
    for configured, said in (("Adam", "Adam (AdamW), "), ("SGD", "AdamW of the script, not the configuration's SGD, ")):
        checkpoint(tmp_path / configured, config={**CONFIG, "optimizer": {"type": configured, "params": {}}})
        assert said in run("info", tmp_path / configured)[1]


# --- diff ---


def test_equal_checkpoints_are_equal(tmp_path: Path, run: Run) -> None:
    checkpoint(tmp_path / "a")
    checkpoint(tmp_path / "b", tag="other")
    status, out, _ = run("diff", tmp_path / "a", tmp_path / "b", "-q")
    assert (status, out) == (0, "19 equal, 0 different, 0 missing, 0 extra\n")


def test_every_kind_of_difference_between_checkpoints_is_listed(tmp_path: Path, run: Run) -> None:
    write_checkpoint(sample(), tmp_path / "a", "t")
    other = sample()
    other.tensors["master", "l1.weight"][2, 3] += 0.5
    other.tensors["master", "extra"] = torch.ones(2)
    del other.tensors["buffer", "scale"]
    other.tensors["optim.exp_avg", "l1.bias"] = torch.zeros(8)
    write_checkpoint(other, tmp_path / "b", "t")
    status, out, _ = run("diff", tmp_path / "a", tmp_path / "b", "-q")
    assert status == 1
    assert "different master l1.weight  (1 of 42 elements, max abs diff 0.5, first at 15)" in out
    assert "missing   buffer scale" in out and "extra     master extra" in out
    assert "different optim.exp_avg l1.bias  (shape [7] and [8])" in out


def test_nan_equals_nan_and_nothing_else(tmp_path: Path, run: Run) -> None:
    for name, value in (("a", float("nan")), ("b", float("nan")), ("c", 1.0)):
        source = sample()
        source.tensors["master", "l1.bias"][0] = value
        write_checkpoint(source, tmp_path / name, "t")
    assert run("diff", tmp_path / "a", tmp_path / "b")[0] == 0
    status, out, _ = run("diff", tmp_path / "a", tmp_path / "c", "-q")
    assert status == 1 and "max abs diff inf" in out


def test_a_pickled_model_file_that_would_run_code_is_refused(tmp_path: Path, run: Run) -> None:
    checkpoint(tmp_path / "a")
    flag = tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> tuple:
            return (os.mkdir, (str(flag),))

    torch.save({"emb.weight": Evil()}, tmp_path / "evil.bin")
    (tmp_path / "raw.bin").write_bytes(pickle.dumps(Evil()))
    for name in ("evil.bin", "raw.bin"):
        status, _, err = run("diff", tmp_path / "a", tmp_path / name)
        assert status == 2 and "weights_only=True" in err
    assert not flag.exists()


# --- audit ---


def test_audit_counts_no_opcode_in_what_loading_reads(tmp_path: Path, run: Run) -> None:
    """And the files for other programs do load with ``weights_only``."""
    folder = checkpoint(tmp_path)
    status, out, _ = run("audit", tmp_path)
    assert status == 0 and out.endswith("pickle opcodes: 0\n")
    assert "for other programs, never read here: 3 files, plain values, loadable with weights_only=True" in out
    stubs = sorted(folder.glob("*_states.pt"))
    assert [p.name for p in stubs][-1] == "mp_rank_00_model_states.pt" and len(stubs) == 3
    for path in stubs:
        assert torch.load(path, weights_only=True)["ds_version"] and not unsafe(path)


def test_audit_finds_a_stub_that_calls_something(tmp_path: Path, run: Run) -> None:
    folder = checkpoint(tmp_path)

    class Evil:
        def __reduce__(self) -> tuple:
            return (os.getcwd, ())

    torch.save(Evil(), folder / "mp_rank_00_model_states.pt")
    status, out, _ = run("audit", tmp_path)
    assert status == 1 and "NOT PLAIN" in out and "getcwd" in out


def test_audit_finds_a_pickle_in_the_place_of_a_tensor_file(tmp_path: Path, run: Run) -> None:
    folder = checkpoint(tmp_path)
    for protocol in range(2, 6):
        (folder / DATA).write_bytes(pickle.dumps({"a": [1, os.getcwd]}, protocol=protocol))
        status, out, _ = run("audit", folder)
        assert status == 1 and "a pickle where tensors should be" in out


def test_audit_keeps_a_number_and_the_names_however_long_a_pickle_is(tmp_path: Path) -> None:
    path = tmp_path / "long.pkl"
    path.write_bytes(b"\x80\x02" + b"N0" * 5000 + b"cos\nsystem\n" * 100 + b".")
    assert scan(path) == {"": 10002, "os system": 100}


def test_audit_of_the_reference_layout_counts_its_opcodes(tmp_path: Path, run: Run) -> None:
    checkpoint(tmp_path / "a")
    assert run("export", tmp_path / "a", tmp_path / "b", "--format", "deepspeed")[0] == 0
    status, out, _ = run("audit", tmp_path / "b")
    assert status == 1 and "deepspeed.runtime.zero.config ZeroStageEnum" in out and not out.endswith("opcodes: 0\n")


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A checkpoint whose saver chose to pickle a piece of client state."""
    folder = checkpoint(tmp_path)
    manifest = read_manifest(folder)
    own = manifest.facts["ranks"][0]
    encoded = encode({"mine": 5, "odd": Fraction(1, 3)}, name="client_state", allow_rest=True)
    own |= {"client_state": encoded.json, "pickled": save_pickled(folder, 0, encoded.rest)}
    rewrite(folder, manifest)
    return folder


def test_pickled_client_state_is_counted_and_never_opened_unasked(pickled: Path, run: Run) -> None:
    status, out, _ = run("audit", pickled)
    assert status == 1 and "pickled_client_state_00000.pt" in out and "fractions Fraction" in out
    status, out, _ = run("info", pickled)
    assert status == 0 and "allow_pickle" in out and "trained in bfloat16" in out
    assert run("verify", pickled)[0] == 0
    out_folder = pickled.parent / "out"
    assert run("export", pickled, out_folder / "hf", "--format", "hf")[0] == 0
    assert run("export", pickled, out_folder / "ds", "--format", "deepspeed")[0] == 2
    assert run("export", pickled, out_folder / "ds", "--format", "deepspeed", "--allow-pickle")[0] == 0


def test_damaged_pickled_client_state_is_found_without_opening_it(pickled: Path, run: Run) -> None:
    victim = pickled / "pickled_client_state_00000.pt"
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    status, out, _ = run("verify", pickled)
    assert status == 1 and "pickled_client_state_00000.pt" in out
    victim.unlink()
    assert run("verify", pickled)[0] == 1


# --- prune ---


def test_prune_removes_what_a_dead_save_left_and_not_what_a_live_one_writes(tmp_path: Path, run: Run) -> None:
    from deepspeed.checkpoint.format import folders

    checkpoint(tmp_path)
    live = folders.begin(tmp_path, "global_step9")
    dead = tmp_path / live.name.replace(f"-{os.getpid()}-", "-99999999-")
    dead.mkdir()
    status, out, _ = run("prune", tmp_path, "--keep-last", 1)
    assert status == 0 and "left behind by a save that died" in out
    assert live.is_dir() and not dead.exists()


def test_prune_says_what_it_cannot_remove(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.checkpoint.format import folders

    def refuse(*_: object) -> None:
        raise PermissionError

    for number, tag in enumerate(("old", "new")):
        os.utime(checkpoint(tmp_path, tag=tag) / MANIFEST, (number, number))
    monkeypatch.setattr(folders.os, "rename", refuse)
    status, out, err = run("prune", tmp_path, "--keep-last", 1)
    assert (status, out) == (2, "") and f"{tmp_path / 'old'} cannot be removed" in err


# --- usage ---


@pytest.mark.parametrize("command", ["verify", "info", "audit", "diff", "export", "import", "prune"])
def test_wrong_paths_are_one_sentence_and_exit_2(tmp_path: Path, run: Run, command: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    more: dict[str, list[object]] = {
        "diff": [tmp_path / "empty"],
        "export": [tmp_path / "out", "--format", "hf"],
        "import": [tmp_path / "out"],
        "prune": ["--keep-last", 1],
    }
    for name in ("empty", "file", "missing"):
        status, out, err = run(command, tmp_path / name, *more.get(command, []))
        assert (status, out) == (2, "") and err.count("\n") == 1 and name in err
    assert not (tmp_path / "out").exists()


def test_a_missing_tag_names_those_that_are_there(tmp_path: Path, run: Run) -> None:
    checkpoint(tmp_path)
    status, _, err = run("verify", tmp_path, "--tag", "global_step4")
    assert status == 2 and "global_step4" in err and "global_step3" in err


def test_sizes_are_numbers_with_a_unit() -> None:
    sizes = {"5GB": 5 * 10**9, "1.5 KiB": 1536, "7": 7, "200mb": 2 * 10**8}
    assert {text: byte_count(text) for text in sizes} == sizes
    for malformed in ("", "GB", "-1GB", "0", "5XB", "1e9"):
        with pytest.raises(ValueError, match="byte"):
            byte_count(malformed)


# --- import ---


def test_import_brings_everything_and_loads_without_pickle(tmp_path: Path, run: Run) -> None:
    checkpoint(tmp_path / "a")
    assert run("export", tmp_path / "a", tmp_path / "b", "--format", "deepspeed")[0] == 0
    status, said, _ = run("import", tmp_path / "b", tmp_path / "c")
    assert status == 0 and said.splitlines()[-1].startswith("not kept: random generators and the position in the data")
    assert run("verify", tmp_path / "c")[0] == 0
    assert run("diff", tmp_path / "b", tmp_path / "c")[0] == 0
    assert run("audit", tmp_path / "c")[1].endswith("pickle opcodes: 0\n")
    assert (tmp_path / "c" / "latest").read_text() == "global_step3"
    assert json.loads((tmp_path / "c" / "global_step3" / MANIFEST).read_text())["facts"]["engine"]["global_steps"] == 3
    assert run("import", tmp_path / "b", tmp_path / "c")[0] == 2
    status, _, err = run("import", tmp_path / "c", tmp_path / "d")
    assert status == 2 and "of this package already" in err and not (tmp_path / "d").exists()
    assert run("import", tmp_path / "b", tmp_path / "c", "--as", "again")[0] == 0


def test_a_failed_import_leaves_nothing(tmp_path: Path, run: Run) -> None:
    checkpoint(tmp_path / "a")
    assert run("export", tmp_path / "a", tmp_path / "b", "--format", "deepspeed")[0] == 0
    victim = next((tmp_path / "b").rglob("bf16_zero_pp_rank_1*"))
    victim.write_bytes(victim.read_bytes()[:-200])
    status, _, err = run("import", tmp_path / "b", tmp_path / "c")
    assert status == 2 and victim.name in err
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").iterdir())
