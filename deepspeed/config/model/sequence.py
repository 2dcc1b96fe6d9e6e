"""The block ``sequence``: how one long sequence is worked on by the ranks that share it (an extension)."""

from typing import Literal

from deepspeed.config.model.values import Block, key


class SequenceConfig(Block):
    """``sequence``: long sequences."""

    attention: Literal["auto", "ulysses"] = key(
        "auto",
        "How the ranks of one sequence compute attention: ulysses divides the heads; auto: that, for models of "
        "Transformers.",
    )
