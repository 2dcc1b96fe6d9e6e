"""Several nodes: how they are reached, find each other and end together."""
