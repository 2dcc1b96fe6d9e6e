"""Checkpoints that other programs wrote, and the way back into their layout."""
