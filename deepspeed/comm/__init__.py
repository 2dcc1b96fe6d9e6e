"""Public communication module: the calls of ``torch.distributed``, start-up and the communication log."""

from types import ModuleType as _Module

from torch.distributed import ReduceOp as ReduceOp

from deepspeed.comm.calls import (
    P2POp as P2POp,
    all_gather as all_gather,
    all_gather_coalesced as all_gather_coalesced,
    all_gather_into_tensor as all_gather_into_tensor,
    all_gather_object as all_gather_object,
    all_reduce as all_reduce,
    all_reduce_coalesced as all_reduce_coalesced,
    all_to_all as all_to_all,
    all_to_all_single as all_to_all_single,
    allgather_fn as allgather_fn,
    barrier as barrier,
    batch_isend_irecv as batch_isend_irecv,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    destroy_process_group as destroy_process_group,
    gather as gather,
    get_all_ranks_from_group as get_all_ranks_from_group,
    get_global_rank as get_global_rank,
    get_local_rank as get_local_rank,
    get_rank as get_rank,
    get_world_group as get_world_group,
    get_world_size as get_world_size,
    has_all_gather_into_tensor as has_all_gather_into_tensor,
    has_all_reduce_coalesced as has_all_reduce_coalesced,
    has_coalescing_manager as has_coalescing_manager,
    has_reduce_scatter_tensor as has_reduce_scatter_tensor,
    inference_all_reduce as inference_all_reduce,
    initialize_mesh_device as initialize_mesh_device,
    irecv as irecv,
    is_available as is_available,
    is_initialized as is_initialized,
    isend as isend,
    monitored_barrier as monitored_barrier,
    new_group as new_group,
    recv as recv,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    reduce_scatter_fn as reduce_scatter_fn,
    reduce_scatter_tensor as reduce_scatter_tensor,
    scatter as scatter,
    send as send,
)
from deepspeed.comm.init import init_distributed as init_distributed, mpi_discovery as mpi_discovery
from deepspeed.comm.trace import (
    configure as configure,
    get_comm_operation_count as get_comm_operation_count,
    get_logged_comm_ops as get_logged_comm_ops,
    has_comm_data as has_comm_data,
    log_summary as log_summary,
    reset_log as reset_log,
)

__all__ = [name for name, value in globals().items() if not (name.startswith("_") or isinstance(value, _Module))]
