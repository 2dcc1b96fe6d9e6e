from deepspeed.client.zero.optimizer import DeepSpeedZeRoOffload
