"""The block ``sequence``: how one long sequence is worked on by the ranks that share it (an extension)."""

from typing import Literal

from deepspeed.config.model.values import Block, key


class SequenceConfig(Block):
    """``sequence``: long sequences."""

    attention: Literal["auto", "ulysses", "ring", "both"] = key(
        "auto",
        "ulysses divides heads, ring passes keys around; auto: ulysses, and both where heads are fewer than ranks.",
    )
