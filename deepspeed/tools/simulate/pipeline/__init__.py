"""Pipelines on the simulated device: one rank of every stage, and their steps put together."""
