"""Import path of the process-group getters."""

from deepspeed.comm.group_getters import (
    get_broadcast_src_rank as _get_broadcast_src_rank,
)
from deepspeed.comm.group_getters import (
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
    get_tensor_model_parallel_world_size,
    initialize,
)
from deepspeed.comm.group_getters import (
    get_data_parallel_group as _get_data_parallel_group,
)
from deepspeed.comm.group_getters import (
    get_data_parallel_rank as _get_data_parallel_rank,
)
from deepspeed.comm.group_getters import (
    get_data_parallel_world_size as _get_data_parallel_world_size,
)
from deepspeed.comm.group_getters import (
    get_expert_parallel_group as _get_expert_data_parallel_group,
)
from deepspeed.comm.group_getters import (
    get_expert_parallel_group as _get_expert_parallel_group,
)
from deepspeed.comm.group_getters import (
    get_expert_parallel_group as _get_expert_parallel_rank,
)
from deepspeed.comm.group_getters import (
    get_expert_parallel_group as _get_expert_parallel_world_size,
)
from deepspeed.comm.group_getters import (
    get_local_all_to_all_group as _get_local_all_to_all_group,
)
from deepspeed.comm.group_getters import (
    get_sequence_data_parallel_group as _get_sequence_data_parallel_group,
)
from deepspeed.comm.group_getters import (
    get_sequence_data_parallel_rank as _get_sequence_data_parallel_rank,
)
from deepspeed.comm.group_getters import (
    get_sequence_data_parallel_world_size as _get_sequence_data_parallel_world_size,
)
from deepspeed.comm.group_getters import (
    get_sequence_parallel_group as _get_sequence_parallel_group,
)
from deepspeed.comm.group_getters import (
    get_sequence_parallel_rank as _get_sequence_parallel_rank,
)
from deepspeed.comm.group_getters import (
    get_sequence_parallel_world_size as _get_sequence_parallel_world_size,
)
from deepspeed.comm.group_getters import (
    get_tensor_model_parallel_group as _get_model_parallel_group,
)
from deepspeed.comm.group_getters import (
    get_tensor_model_parallel_group as get_model_parallel_group,
)
from deepspeed.comm.group_getters import (
    get_tensor_model_parallel_rank as _get_model_parallel_rank,
)
from deepspeed.comm.group_getters import (
    get_tensor_model_parallel_rank as get_model_parallel_rank,
)
from deepspeed.comm.group_getters import (
    get_tensor_model_parallel_world_size as _get_model_parallel_world_size,
)
from deepspeed.comm.group_getters import (
    get_tensor_model_parallel_world_size as get_model_parallel_world_size,
)

__all__ = [
    "_get_broadcast_src_rank",
    "_get_data_parallel_group",
    "_get_data_parallel_rank",
    "_get_data_parallel_world_size",
    "_get_expert_data_parallel_group",
    "_get_expert_parallel_group",
    "_get_expert_parallel_rank",
    "_get_expert_parallel_world_size",
    "_get_local_all_to_all_group",
    "_get_model_parallel_group",
    "_get_model_parallel_rank",
    "_get_model_parallel_world_size",
    "_get_sequence_data_parallel_group",
    "_get_sequence_data_parallel_rank",
    "_get_sequence_data_parallel_world_size",
    "_get_sequence_parallel_group",
    "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
]
