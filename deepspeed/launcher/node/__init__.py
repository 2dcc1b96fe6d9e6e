"""One node: its ranks, its link to the other nodes, and the verdict on what became of them."""
