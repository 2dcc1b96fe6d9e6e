"""The blocks ``sequence`` (an extension) and ``compile``: how ranks work on one long sequence that they share."""

from typing import Literal

from deepspeed.config.model import unread
from deepspeed.config.model.values import Block, Flag, Positive, key


class SequenceConfig(Block):
    """``sequence``: long sequences."""

    attention: Literal["auto", "ulysses", "ring", "both"] = key(
        "auto",
        "ulysses divides heads, ring passes keys around; auto: ulysses, and both where heads are fewer than ranks.",
    )
    loss: Literal["auto", "tiled", "whole"] = key(
        "auto",
        "Logits and loss of a Hugging Face model, in tiles or whole; auto: tiles where logits would be the peak.",
    )
    mlp_tiles: Positive | Literal["auto"] = key(
        "auto",
        "Tiles in which an MLP or a stack of experts is computed; 1 is off; auto: by bytes, where these are many.",
    )
    offload_activations: Flag = key(
        False, "What the forward keeps for the backward is in host memory meanwhile (for models on a device)."
    )
    plan: Literal["off", "auto"] = key(
        "off", "Blocks of a Hugging Face model keep, recompute or offload activations; auto: by a measured step."
    )


class CompileConfig(unread.CompileKeys):
    """``compile``: passes over what ``engine.compile()`` compiles. The threshold is in bytes."""

    deepcompile: Flag = key(False, "DeepSpeed's switch of the passes; engine.compile() needs none.")
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = key(None, "autosp: ranks share sequences.")
