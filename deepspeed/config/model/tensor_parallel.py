"""The block ``tensor_parallel``: how many ranks share each layer, and how layers are split."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deepspeed.config.model import unread, values
from deepspeed.config.model.values import Block, Count, Flag, Names, Positive, key

_List = Annotated[tuple[Any, ...], BeforeValidator(values.freeze)]


class LayerRuleConfig(Block):
    """``tensor_parallel.partition_config.layer_specs[]``: how the parameters that match patterns are split."""

    patterns: Names = key((), "Regular expressions on parameter names, matched from the start; the first match wins.")
    partition_type: Literal["column", "row", "skip"] = key(
        "column", "Split by output (column), by input (row), or not at all (skip)."
    )
    shape: _List | None = key(
        None, "What is packed into the weight: at partition_dim how many equal parts, or the list of their sizes."
    )
    partition_dim: Count | None = key(None, "Dimension of shape that is split; null is 0. Of an embedding: 0 or 1.")
    model_types: Names | None = key(None, "Model types, in any case, to which the rule is limited.")
    gather_output: Flag = key(False, "Gather the output of a column split on every rank.")
    grad_allreduce: Flag = key(False, "Sum the gradients of a skipped layer over the ranks that share it.")


class PartitionConfig(unread.TensorParallelPartitionConfigKeys):
    """``tensor_parallel.partition_config``: rules of your own."""

    use_default_specs: Flag = key(True, "Split what your rules leave by the model's plan, or by names.")
    strict_mode: Flag = key(False, "Fail when a linear layer matches no rule.")
    lm_head_patterns: Names = key(("lm_head", "embed_out"), "Module names that are output heads.")
    layer_specs: tuple[LayerRuleConfig, ...] = Field(())


class TensorGroupConfig(unread.TensorParallelTensorParallelKeys):
    """``tensor_parallel.tensor_parallel`` (also ``tp``): the group of ranks that share one layer."""

    tp_size: Positive = key(1, "Ranks that share each layer; 1, or equal to autotp_size.")


class TensorParallelConfig(unread.TensorParallelKeys):
    """``tensor_parallel``: layers split over ranks."""

    autotp_size: Count = key(0, "Ranks that share each layer; 0 and 1 are off.", values.Support.HONOURED, "", "", (1,))
    vocab_parallel_lm_head: Flag | None = key(
        None, "true: each rank computes logits and loss of some words; false: output head and embedding stay whole."
    )
    sequence_parallel_norms: Flag = key(False, "Norms and residuals on each rank's part of the tokens (an extension).")
    tensor_parallel: TensorGroupConfig = Field(default_factory=TensorGroupConfig)
    partition_config: PartitionConfig | None = key(None, "Splitting rules of your own; they win over the model's plan.")

    @property
    def ways(self) -> int:
        """Return the number of ranks that share each layer."""
        return max(1, self.autotp_size)
