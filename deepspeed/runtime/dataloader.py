from deepspeed.client.data_loader import DeepSpeedDataLoader, RepeatingLoader
