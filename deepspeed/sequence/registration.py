"""``UlyssesSPAttentionHF``: attention of Transformers over sequence-parallel ranks for clients that weigh losses."""

import importlib
from functools import partial
from itertools import product
from typing import Any

from deepspeed.client.comm.groups import KINDS, answer_of
from deepspeed.comm.collectives import require_group
from deepspeed.comm.mesh.groups import plain_mesh
from deepspeed.comm.mesh.topology import dense_topology
from deepspeed.errors import SequenceError
from deepspeed.sequence.attention import PREFIX, family_of, registered
from deepspeed.sequence.wire import check

_OLDEST = (4, 51, 3)
_WHO = "register_with_transformers"


class SequenceMpu:
    """Process groups of a job whose consecutive ranks share sequences, for ``deepspeed.initialize(mpu=...)``: getters
    as those of ``deepspeed.utils.groups``.
    """

    def __init__(self, sequence_parallel_size: int, *, disable_in_eval: bool) -> None:
        self.disable_in_eval = disable_in_eval
        topology = dense_topology(plain_mesh("").job.ranks, sp=sequence_parallel_size)
        for family, kind in product(("sequence_parallel", "data_parallel", "sequence_data_parallel"), KINDS):
            setattr(self, f"get_{family}_{kind}", partial(answer_of, topology, family, kind))


class UlyssesSPAttentionHF:
    """Attention on all tokens of a part of the heads, for models of Transformers."""

    @staticmethod
    def register_with_transformers(
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,  # noqa: FBT001, FBT002 - the order that clients know
        disable_in_eval: bool = False,  # noqa: FBT001, FBT002
        max_length: int | None = None,
    ) -> SequenceMpu | None:
        """Register the attention ``ulysses`` with Transformers; return the mpu for ``deepspeed.initialize``, which lets
        the model use it, or None for one rank.

        The client cuts batches (``UlyssesSPDataLoaderAdapter``) and gathers the losses of a sequence's ranks with
        torch's differentiable ``all_gather``, weighed by their targets. ValueError for what cannot be divided.

        Args:
            model_name_or_path: A loaded model, or where its configuration is.
            core_attn_implementation: What computes it: sdpa, flex_attention, a flash implementation or a hub's kernel.
            sequence_parallel_size: Consecutive ranks that share a sequence.
            micro_batch_size: Has no effect, as any number of rows is taken.
            seq_length: Tokens, needed where ``seq_length_is_variable`` is false; ``max_length`` is an older name.
            disable_in_eval: Each rank evaluates whole batches by itself.
        """
        if sequence_parallel_size == 1:
            return None
        require_group(_WHO)
        transformers = importlib.import_module("transformers")
        version = tuple(int(part) for part in transformers.__version__.split(".")[:3] if part.isdigit())
        if version < _OLDEST:
            raise SequenceError(f"{_WHO} needs transformers 4.51.3 or newer, not {transformers.__version__}")
        length = seq_length if seq_length is not None else max_length
        if not seq_length_is_variable and (length is None or length % sequence_parallel_size):
            raise SequenceError(
                f"{_WHO}: seq_length is {length}; where seq_length_is_variable is false, it is needed, a multiple of "
                f"{sequence_parallel_size}"
            )
        if not family_of(core_attn_implementation):
            registered(core_attn_implementation, transformers)  # which says why not
        model = model_name_or_path
        if hasattr(model, "config"):
            current = model.config._attn_implementation
            if current != core_attn_implementation and not current.startswith(PREFIX):
                raise SequenceError(
                    f"{_WHO}: the model was loaded with attention {current!r}, and core_attn_implementation is "
                    f"{core_attn_implementation!r}; load it with attn_implementation={core_attn_implementation!r}"
                )
            check(model, sequence_parallel_size, shifts=False)
        else:
            config = transformers.AutoConfig.from_pretrained(model).get_text_config()
            if config.num_attention_heads < sequence_parallel_size:
                raise SequenceError(
                    f"{_WHO}: {sequence_parallel_size} ranks, but {config.num_attention_heads} attention heads"
                )
        registered(core_attn_implementation, transformers, name=PREFIX)
        return SequenceMpu(sequence_parallel_size, disable_in_eval=disable_in_eval)
