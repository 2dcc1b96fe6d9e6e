"""``ds_checkpoint audit``: what every file of a checkpoint is, and how many pickle opcodes loading would execute."""

import pickletools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepspeed.checkpoint.format import folders
from deepspeed.checkpoint.format.manifest import MANIFEST, Manifest
from deepspeed.checkpoint.load.reader import read_manifest
from deepspeed.checkpoint.tool.common import say, sized

# Classes and functions that torch.load(weights_only=True) knows and that hold only values.
_VALUES = frozenset(
    {
        "collections OrderedDict",
        "torch Size",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        *(
            f"torch {kind}Storage"
            for kind in ["Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"]
        ),
    }
)
_HEAD_BYTES = 512


@dataclass(frozen=True)
class Pickle:
    """Of one file: opcodes, and the globals it names, without which nothing can be called."""

    opcodes: int
    names: frozenset[str]

    @property
    def loads_as_values(self) -> bool:
        """Whether torch.load(weights_only=True) opens it."""
        return self.names <= _VALUES


def scan(path: Path) -> Pickle | None:
    """Every pickle in ``path`` (a torch archive, or a bare stream), disassembled and never run; None when there is
    none.
    """
    streams: list[bytes] = []
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            streams = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
    else:
        with path.open("rb") as file:
            if file.read(1) == b"\x80":
                file.seek(0)
                streams = [file.read()]
    found = [_disassembled(stream) for stream in streams]
    kept = [f for f in found if f is not None]
    if not kept:
        return None
    return Pickle(sum(f.opcodes for f in kept), frozenset(n for f in kept for n in f.names))


def _disassembled(stream: bytes) -> Pickle | None:
    opcodes, names, texts = 0, set(), ["?", "?"]
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            opcodes += 1
            if opcode.name in ("GLOBAL", "INST"):
                names.add(str(argument))
            elif opcode.name == "STACK_GLOBAL":
                names.add(" ".join(texts[-2:]))
            elif opcode.name.startswith("EXT"):
                names.add(f"extension {argument}")
            elif "UNICODE" in opcode.name:
                texts.append(str(argument))
    except Exception:
        return Pickle(opcodes, frozenset(names)) if opcodes > 1 and names else None
    return Pickle(opcodes, frozenset(names))


@dataclass(frozen=True)
class Finding:
    """One file. ``part``: "loading" reads it always, "opt-in" only when asked to, "others" are for other programs,
    "extra" is unknown.
    """

    file: str
    part: str
    what: str
    opcodes: int = 0


def audit(folder: Path) -> list[Finding]:
    """What every file in the tag's folder is. Raises CheckpointError when the manifest cannot be read."""
    if folders.is_complete(folder):
        return list(_own(folder, read_manifest(folder)))
    found = []
    for path in _files(folder):
        held = scan(path)
        what = "no pickle" if held is None else f"pickle in DeepSpeed's layout; names {_some(held.names)}"
        found.append(Finding(str(path.relative_to(folder)), "loading", what, held.opcodes if held else 0))
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() or p.is_symlink())


def _own(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    pickled = {
        str(r["pickled"]["file"]) for r in manifest.facts.get("ranks") or [] if isinstance(r, dict) and r.get("pickled")
    }
    for path in _files(folder):
        name, held = str(path.relative_to(folder)), scan(path) if path.is_file() else None
        opcodes = held.opcodes if held else 0
        if name == MANIFEST:
            yield Finding(name, "loading", "JSON with a checksum", opcodes)
        elif name in manifest.files:
            # These bytes are never unpickled; an archive in their place would not match the checksums, but is no tensor
            # file either.
            yield Finding(
                name,
                "loading",
                "raw tensors with checksums" if held is None else "a pickle where tensors should be",
                opcodes,
            )
        elif name in pickled or name.startswith("pickled_client_state"):
            yield Finding(
                name, "opt-in", f"pickled client state; names {_some(held.names if held else frozenset())}", opcodes
            )
        elif name.endswith("_states.pt"):
            yield Finding(name, "others", _stub(held), opcodes)
        else:
            yield Finding(
                name,
                "extra",
                "not part of the checkpoint, never read" if held is None else "holds a pickle, never read",
                opcodes,
            )


def _stub(held: Pickle | None) -> str:
    if held is None:
        return "no pickle"
    if held.loads_as_values:
        return "plain values and tensors" if held.names else "plain values"
    return f"NOT PLAIN: names {_some(held.names - _VALUES)}; do not open it without weights_only=True"


def _some(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)[:6]) or "nothing"


def run(folder: Path) -> int:
    """Print the report; 1 when loading would execute a pickle, or a file for other programs is not plain."""
    found = audit(folder)
    for part, title in (
        ("loading", "read when loading"),
        ("opt-in", "read only with allow_pickle"),
        ("extra", "not read"),
    ):
        rows = [f for f in found if f.part == part]
        if rows:
            say(f"{title}:")
        for row in rows:
            say(
                f"  {row.file:<44} {sized((folder / row.file).stat().st_size):>10}  {row.what}; pickle "
                f"opcodes: {row.opcodes}"
            )
    stubs = [f for f in found if f.part == "others"]
    odd = [f for f in stubs if f.what.startswith("NOT")]
    if stubs:
        plain = "plain values, loadable with weights_only=True" if not odd else f"{len(odd)} NOT PLAIN"
        say(f"for other programs, never read here: {len(stubs)} files, {plain}")
        for row in odd:
            say(f"  {row.file}: {row.what}")
    executed = sum(f.opcodes for f in found if f.part in ("loading", "opt-in"))
    say(f"pickle opcodes: {executed}")
    return 1 if executed or odd else 0
