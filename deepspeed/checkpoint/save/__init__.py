"""Saving: what an engine puts into a checkpoint, and how it gets onto the disk whole."""
