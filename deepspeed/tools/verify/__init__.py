"""Checks that a user can run on his own model: does sharded training compute what plain PyTorch computes?

Nothing here is imported by the engine; ``ds_verify`` and the test suite are the callers.
"""

TOLERANCE = 1e-6  # largest error, unless the command line says otherwise
STEPS = 3  # updates of a run, too
