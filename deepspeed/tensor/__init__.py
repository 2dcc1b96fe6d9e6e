"""Tensor parallelism: layers whose weights and work several ranks share."""
