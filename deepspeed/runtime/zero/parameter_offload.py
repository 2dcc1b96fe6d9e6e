"""Import path of the object that holds sharded parameters when there is no optimizer."""

from deepspeed.zero.client.client_optimizer import DeepSpeedZeRoOffload
