"""The block ``expert_parallel``: over how many ranks the experts of a model are spread, and where they are in it."""

from deepspeed.config.model import unread
from deepspeed.config.model.values import Flag, Num, Positive, Text, key


class ExpertParallelConfig(unread.ExpertParallelKeys):
    """``expert_parallel``: experts of Hugging Face models spread over ranks."""

    enabled: Flag = key(False, "Spread the experts of a Hugging Face model over ranks.")
    autoep_size: Positive = key(1, "Ranks over which the experts of one layer are spread; 1 is off.")
    expert_tensor_parallel_size: Positive = key(1, "Ranks that share each expert, each with a part of its inner width.")
    moe_layer_pattern: Text | None = key(
        None, "Regular expression on the module paths of mixture-of-experts layers; null: the plan of the model."
    )
    expert_pattern: Text | None = key(None, "Attribute of such a layer that holds its experts; null: experts.")
    load_balance_coeff: Num | None = key(
        None, "Step of the bias on the router's scores that evens out loads after each update; null: none.", gt=0
    )

    @property
    def ways(self) -> int:
        """Return the number of ranks among which the experts of a layer are divided."""
        return self.autoep_size * self.expert_tensor_parallel_size if self.enabled else 1
