"""``ds_checkpoint import``: a checkpoint in DeepSpeed's own layout as one of this package's."""

from pathlib import Path

from deepspeed.checkpoint.foreign.rewrite import write_checkpoint
from deepspeed.checkpoint.save.writer import progress
from deepspeed.checkpoint.tool.common import opened, say
from deepspeed.checkpoint.weights.weights import stream, total_bytes
from deepspeed.errors import CheckpointError


def run(path: Path, out: Path, *, tag: str | None, as_tag: str | None) -> int:
    """Convert; 0. Raises CheckpointError for one of this package's, and when the tag is there already."""
    with opened(path, tag) as source:
        if (
            source.kind == "deepspeed-checkpoint"
        ):  # what this writes anew has no random generators and one rank's client state
            raise CheckpointError(
                f"{source.path} is a checkpoint of this package already, and loads anywhere as it is; copy its folder"
            )
        name = as_tag or source.path.name
        if (out / name).exists():
            raise CheckpointError(f"{out / name} is there already; name another folder, or another tag with --as")
        with progress("import", total_bytes(stream(source, key) for key in source.entries)) as told:
            final = write_checkpoint(source, out, name, told=told)
        say(f"wrote {final}: {sum(k[0] != 'plain' for k in source.entries)} tensors from {source.kind}")
        say(
            "not kept: random generators and the position in the data, of which DeepSpeed's files hold nothing "
            "that can be used"
        )
    return 0
