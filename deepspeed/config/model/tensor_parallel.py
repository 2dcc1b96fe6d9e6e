"""The block ``tensor_parallel``: how many ranks share each layer, and how layers are split."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deepspeed.config.model import unread, values
from deepspeed.config.model.values import Block, Count, Flag, Names, Positive, key

_List = Annotated[tuple[Any, ...], BeforeValidator(values.freeze)]
_NOT_YET = values.Support.NOT_YET
_PRESETS = Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"]
_from_a_program = BeforeValidator(unread.from_a_program)


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
    embedding_partition_dim: Count = key(
        1, "Dimension along which embeddings are split.", values.Support.INERT, "a layer_specs rule says it of each"
    )
    lm_head_patterns: Names = key(("lm_head", "embed_out"), "Module names that are output heads.")
    layer_specs: tuple[LayerRuleConfig, ...] = Field(())


class TensorGroupConfig(unread.TensorParallelTensorParallelKeys):
    """``tensor_parallel.tensor_parallel`` (also ``tp``): the group of ranks that share one layer."""

    tp_size: Positive = key(1, "Ranks that share each layer; 1, or equal to autotp_size.")
    mpu: Annotated[Any, _from_a_program] = key(
        None,
        "Object with the process groups of a model-parallel program (from Python only).",
        _NOT_YET,
        "pass it to deepspeed.initialize(mpu=...)",
        "tensor_parallel.autotp_size",
    )
    tp_group: Annotated[Any, _from_a_program] = key(
        None,
        "Process group of the ranks that share a layer (from Python only).",
        _NOT_YET,
        "pass it to deepspeed.tp_model_init(..., tp_group=...)",
        "tensor_parallel.autotp_size",
    )


class TensorParallelConfig(unread.TensorParallelKeys):
    """``tensor_parallel``: layers split over ranks."""

    autotp_size: Count = key(0, "Ranks that share each layer; 0 and 1 are off.", values.Support.HONOURED, "", "", (1,))
    vocab_parallel_lm_head: Flag | None = key(
        None, "true: each rank computes logits and loss of some words; false: output head and embedding stay whole."
    )
    sequence_parallel_norms: Flag = key(False, "Norms and residuals on each rank's part of the tokens (an extension).")
    vocab_parallel_ce_backend: Literal["torch", "liger"] = key(
        "torch",
        "Implementation of the cross-entropy over a split output head.",
        _NOT_YET,
        "torch computes it",
        "tensor_parallel.autotp_size",
    )
    tensor_parallel: TensorGroupConfig = Field(default_factory=TensorGroupConfig)
    preset_model: _PRESETS | None = key(
        None, "Built-in splitting rules of a model family.", values.Support.INERT, "layers are known by their names"
    )
    partition_config: PartitionConfig | None = key(None, "Splitting rules of your own; they win over the model's plan.")

    @property
    def ways(self) -> int:
        """How many ranks share each layer."""
        return max(1, self.autotp_size)
