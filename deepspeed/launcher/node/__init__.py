"""One node: its ranks, their cores and environment, and what became of them."""
