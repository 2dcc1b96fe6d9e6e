"""Loading: opening a folder, comparing it with the engine, filling the engine."""
