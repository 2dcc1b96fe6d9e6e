"""Several documents as one packed sequence, and the part of it that each rank of a group has. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed.errors import UsageError

IGNORED = -100  # the label of what has no loss


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


def share_labels(sample: dict[str, torch.Tensor], part: int, parts: int) -> dict[str, torch.Tensor]:
    """Return ``sample`` with every ``parts``-th of its labels, so that the copies together have each label once."""
    labels = sample["labels"]
    counts = labels[1:].ne(IGNORED).cumsum(0) % parts
    return {**sample, "labels": torch.cat([labels[:1], labels[1:].masked_fill(counts != part, IGNORED)])}


def pack(samples: Sequence[dict[str, torch.Tensor]], *, multiple: int = 1) -> dict[str, torch.Tensor]:
    """Return one row [1, tokens] of documents, whose position ids each begin at 0, padded to a ``multiple``.

    The first token of a document has no label, as no token before it is to tell it. Padding is a document of its own.
    """
    ids, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
    positions = [torch.arange(len(document)) for document in ids]
    labels = [torch.cat([label.new_full((1,), IGNORED), label[1:]]) for label in labels]
    if missing := -sum(map(len, ids)) % multiple:
        ids.append(ids[0].new_zeros(missing))
        positions.append(torch.arange(missing))
        labels.append(labels[0].new_full((missing,), IGNORED))
    named = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {name: torch.cat(parts)[None] for name, parts in named.items()}


def part_of(batch: dict[str, torch.Tensor], index: int, degree: int) -> dict[str, torch.Tensor]:
    """Return the tokens of rank ``index`` of ``degree``. Their labels, by both names that models know, are those of the
    next token, which may be another rank's.
    """
    labels = batch["labels"]
    shifted = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)
    whole = {**batch, "labels": shifted, "shift_labels": shifted}
    return {name: value.chunk(degree, dim=1)[index] for name, value in whole.items()}
