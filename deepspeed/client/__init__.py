"""What clients import or call beside the engine; the mechanism is elsewhere."""
