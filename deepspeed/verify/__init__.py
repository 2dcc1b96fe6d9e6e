"""Checks that a user can run on his own model: does sharded training compute what plain PyTorch computes?

Nothing here is imported by the engine; ``ds_verify`` and the test suite are the callers.
"""
