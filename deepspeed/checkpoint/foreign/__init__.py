"""Checkpoints that other programs wrote, and files of weights that other programs read."""
