"""What an engine did and when: one trace over all ranks, the record of a run, and ranks that are slow."""
