from deepspeed.data.move import move_to_device
from deepspeed.device import set_random_seed
from deepspeed.observe.timers import see_memory_usage
