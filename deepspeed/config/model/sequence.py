"""The block ``sequence``: how one long sequence is worked on by the ranks that share it (an extension)."""

from typing import Literal

from deepspeed.config.model.values import Block, Flag, Positive, key


class SequenceConfig(Block):
    """``sequence``: long sequences."""

    attention: Literal["auto", "ulysses", "ring", "both"] = key(
        "auto",
        "How the ranks of one sequence compute attention: ulysses divides the heads; ring passes keys around; both: "
        "heads among neighbours, keys around the rest; auto: ulysses, and both where there are fewer heads than ranks.",
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
