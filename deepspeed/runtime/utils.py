from deepspeed.accelerator.device import move_to_device, set_random_seed
from deepspeed.client.comm.norms import clip_grad_norm_, get_global_norm
from deepspeed.client.comm.partitioned import PartitionedTensor
from deepspeed.monitor.timers import see_memory_usage
from deepspeed.pipe.partition import partition_balanced, partition_uniform, prefix_sum_inc
