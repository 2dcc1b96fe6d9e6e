"""Checks that a user can run on his own model: does sharded training compute what plain PyTorch computes?

Nothing here is imported by the engine; ``ds_verify`` and the test suite are the callers.
"""

TOLERANCE, STEPS = 1e-6, 3  # largest error, and updates of a run, unless the line says otherwise
