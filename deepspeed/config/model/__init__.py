"""The configuration's keys as frozen models, and what they mean together."""
