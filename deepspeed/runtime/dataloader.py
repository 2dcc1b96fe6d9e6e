"""Import path of the loaders."""

from deepspeed.data.loader import DeepSpeedDataLoader, RepeatingLoader
