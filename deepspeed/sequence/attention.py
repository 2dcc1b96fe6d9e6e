"""Attention of Transformers on all tokens of a part of the heads, whichever implementation computes it.

A model calls it by the name that its configuration has, through the registry of Transformers; masks are made by the
same name. In place of a mask the layers get the ``Layout`` of the batch, which recomputation hands over once more.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from deepspeed.errors import SequenceError
from deepspeed.sequence.layout import Core, Layout
from deepspeed.sequence.ring import RingMask, attend_around

PREFIX = "ulysses"
_REST = "cannot be divided over the ranks of a sequence; set sequence_parallel_size to 1"
FAMILIES = ("sdpa", "flash", "flex")
_NOT_IN_A_RING = ("dropout", "softcap")
_RUNNING: ContextVar[tuple[Layout | None, float]] = ContextVar("deepspeed_sequence", default=(None, 1.0))


@dataclass(frozen=True)
class Masked:
    """What the layers of one kind get in place of a mask. ``window``: each token sees so many, itself included."""

    layout: Layout
    window: int | None
    causal: bool


@contextmanager
def running(layout: Layout | None, share: float = 1.0) -> Iterator[None]:
    """Let masks made inside be those of ``layout``; None: of what each rank has by itself. ``share``: of a loss
    that all ranks of a sequence compute alike, the share that each is to return.
    """
    token = _RUNNING.set((layout, share))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def in_progress() -> tuple[Layout | None, float]:
    """Return the layout of the forward on parts of sequences that is under way, if one is, and the share."""
    return _RUNNING.get()


def family_of(core: str) -> str:
    """Return to which of ``FAMILIES`` the implementation ``core`` of Transformers belongs; empty for another."""
    name = core.lower()
    return next((family for family in FAMILIES if family in name), "")


def registered(core: str, transformers: ModuleType, *, name: str = "") -> str:
    """Register attention over sequence-parallel ranks by the implementation ``core``; return its name in Transformers.

    Raises SequenceError for ``eager``, and for one that is not known.
    """
    if not family_of(core):
        raise SequenceError(
            f"attention {core!r} cannot be divided over the ranks of a sequence; load the model with "
            'attn_implementation="sdpa", "flex_attention", a flash implementation or one of a kernel hub'
        )
    name = name or f"{PREFIX}_{core}".replace("/", "-")
    # No graph of a compiler has an exchange in it, nor what differs between batches.
    attend, mask = (torch.compiler.disable(partial(f, core, transformers)) for f in (_attention, _mask))
    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, mask)
    return name


def _mask(core: str, transformers: ModuleType, *args: Any, **kwargs: Any) -> Any:
    """Make what the layers get as a mask, in the place of the mask function of ``core``."""
    layout, _ = in_progress()
    if layout is None:
        return transformers.AttentionMaskInterface()[core](*args, **kwargs)
    special = kwargs.get("use_vmap") or "or_mask" in getattr(kwargs.get("mask_function"), "__qualname__", "")
    causal, window = "allow_is_bidirectional_skip" not in kwargs, kwargs.get("local_size")
    if special or (window and not causal):
        raise SequenceError(
            f"the attention of {type(kwargs.get('config')).__name__} has a mask of its own beside the causal one, "
            f"which {_REST}"
        )
    return Masked(layout, window, causal)


class _Stand:
    """Attention module as the core implementation is to see it: with this rank's heads, and the core's name."""

    def __init__(self, module: Any, **changed: Any) -> None:
        self.__dict__ |= {"_of": module, **changed}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def _attention(core: str, transformers: ModuleType, module: Any, *qkv: torch.Tensor, **kwargs: Any) -> Any:
    """Compute the attention of ``module`` by ``core``; q, k, v: [rows, heads, this rank's tokens, width]."""
    query, key, value = qkv[:3]
    mask = qkv[3] if len(qkv) > 3 else kwargs.pop("attention_mask", None)
    inner = transformers.AttentionInterface()[core]
    if not isinstance(mask, Masked):
        if in_progress()[0] is not None:
            raise SequenceError(
                f"{type(module).__name__} has a mask that transformers.masking_utils did not make; it {_REST}"
            )
        module = _Stand(module, config=_Stand(module.config, _attn_implementation=core))
        return inner(module, query, key, value, mask, **kwargs)
    if kwargs.get("position_bias") is not None:
        raise SequenceError(f"{type(module).__name__} adds a bias to attention, which cannot be divided over ranks")
    window = kwargs.get("sliding_window") or mask.window
    if mask.layout.ring is not None:
        unfit = [name for name in _NOT_IN_A_RING if kwargs.get(name)]
        if unfit or kwargs.get("s_aux") is not None:
            raise SequenceError(
                f"{type(module).__name__} has {', '.join(unfit) or 'sinks'} in its attention, which a ring of ranks "
                "cannot have. Set sequence.attention to ulysses, and sequence_parallel_size to its heads at most"
            )
        seen = RingMask(mask.causal, mask.layout.document_of, window)
        return attend_around(mask.layout, query, key, value, mask=seen, scale=kwargs.get("scaling")), None
    config = _Stand(module.config, _attn_implementation=core)
    kept = {name: item for name, item in kwargs.items() if not name.startswith(("cu_seq_lens_", "max_length_"))}
    kept |= {"position_ids": None, "is_causal": mask.causal}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int, given: Any, **more: Any) -> torch.Tensor:
        stand = _Stand(module, config=config, num_key_value_groups=groups or 1)
        options = {**kept, **more}
        if kwargs.get("s_aux") is not None:  # one sink a head
            mine = mask.layout.heads(query.shape[1], key.shape[1]).queries[mask.layout.group.index]
            options["s_aux"] = kwargs["s_aux"][mine.start : mine.stop]
        output: torch.Tensor = inner(stand, q, k, v, given, **options)[0]
        return output

    family = family_of(core)
    run: Core = {"sdpa": _by_document, "flash": _by_ends, "flex": _by_blocks}[family](call, mask, window)
    return mask.layout.attend(query, key, value, run, whole=family != "sdpa"), None


def _by_document(call: Callable[..., torch.Tensor], _mask: Masked, window: int | None) -> Core:
    """Return the core of an implementation that knows no documents: it gets them one length after the other."""

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: int) -> torch.Tensor:
        tokens = query.shape[2]
        if not window or tokens <= window:
            return call(query, key, value, groups, None)
        # A window's width of queries at once, with the keys that they see: no mask of all tokens by all tokens.
        outputs, numbers = [], torch.arange(tokens, device=query.device)
        for start in range(0, tokens, window):
            stop, first = min(start + window, tokens), max(0, start - window + 1)
            apart = numbers[start:stop, None] - numbers[None, first:stop]
            seen = (apart >= 0) & (apart < window)
            part = query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop]
            outputs.append(call(*part, groups, seen[None, None]))
        return torch.cat(outputs, dim=1)

    return run


def _by_ends(call: Callable[..., torch.Tensor], mask: Masked, window: int | None) -> Core:
    """Return the core of an implementation that is told where documents end."""
    layout = mask.layout

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: int) -> torch.Tensor:
        longest = max(length for _, length in layout.documents)
        more: dict[str, Any] = {} if window is None else {"sliding_window": window}
        if not layout.plain:
            more |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), layout.ends)
            more |= dict.fromkeys(("max_length_q", "max_length_k"), longest)
        return call(query, key, value, groups, None, **more)

    return run


def _by_blocks(call: Callable[..., torch.Tensor], mask: Masked, window: int | None) -> Core:
    """Return the core of an implementation that skips blocks of the mask."""
    layout = mask.layout

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: int) -> torch.Tensor:
        document = layout.document_of

        def seen(row: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            inside = q == q if document is None else document[row, q] == document[row, k]
            if mask.causal:
                inside = inside & (q >= k)
            return inside & (q - k < window) if window else inside

        blocks = create_block_mask(seen, layout.rows, None, layout.tokens, layout.tokens, device=query.device)
        return call(query, key, value, groups, blocks)

    return run
