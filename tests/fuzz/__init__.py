"""Models, configurations and events beside plain torch, from a seed: ``python -m tests.fuzz --seed 7 --ranks 2``."""
