"""The block ``sequence``: how one long sequence is worked on by the ranks that share it (an extension)."""

from typing import Literal

from deepspeed.config.model.values import Block, key


class SequenceConfig(Block):
    """``sequence``: long sequences."""

    attention: Literal["auto", "ulysses", "ring", "both"] = key(
        "auto",
        "How the ranks of one sequence compute attention: ulysses divides the heads; ring passes keys around; both: "
        "heads among neighbours, keys around the rest; auto: ulysses, and both where there are fewer heads than ranks.",
    )
