from deepspeed.data.loader import DeepSpeedDataLoader, RepeatingLoader
