"""Sequence parallelism: sequences that several ranks share, each with a part of their tokens."""
