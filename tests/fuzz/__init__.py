"""Models x configurations x events beside plain torch, drawn from a seed: ``python -m tests.fuzz --seed 7 --ranks 2``."""
