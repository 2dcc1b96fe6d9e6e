"""Several documents as one packed sequence, and the part of it that each rank of a group has."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed.errors import UsageError
from deepspeed.sequence.batch import IGNORED, part_of, whole_batch


def tokens_of(sample: Any) -> dict[str, torch.Tensor]:
    """Return ``input_ids`` and ``labels`` (default: the same) of a sample, 1-D; a sample without names is its ids."""
    named = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    if "input_ids" not in named:
        raise UsageError(f"a sample has no 'input_ids', only {sorted(named)}: rename its column of tokens")
    ids = torch.as_tensor(named["input_ids"]).flatten()
    labels = torch.as_tensor(named.get("labels", ids)).flatten()
    if labels.shape != ids.shape:
        raise UsageError(
            f"a sample has {len(ids)} input_ids and {len(labels)} labels: each token needs one (-100: none)"
        )
    return {"input_ids": ids, "labels": labels}


def pack(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return one row [1, tokens] of documents, whose position ids each begin at 0.

    The first token of a document has no label, as no token before it is to tell it.
    """
    firsts = [sample["labels"].new_full((1,), IGNORED) for sample in samples]
    labels = [torch.cat([first, sample["labels"][1:]]) for first, sample in zip(firsts, samples, strict=True)]
    named = {
        "input_ids": [sample["input_ids"] for sample in samples],
        "position_ids": [torch.arange(len(label)) for label in labels],
        "labels": labels,
    }
    return {name: torch.cat(parts)[None] for name, parts in named.items()}


def part_of_pack(packed: dict[str, torch.Tensor], index: int, degree: int) -> dict[str, torch.Tensor]:
    """Return the tokens of rank ``index`` of ``degree``, whose labels are now those of the next token each: it may be
    another rank's.
    """
    whole = whole_batch(packed, packed["input_ids"], degree)
    whole["labels"] = whole.pop("shift_labels")
    part: dict[str, torch.Tensor] = part_of(whole, whole["input_ids"], index, degree)
    return part
