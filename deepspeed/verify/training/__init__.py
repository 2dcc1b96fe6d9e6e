"""Gates of what a training loop does around a model: the loop itself, batches, schedules, optimizers, the end."""
