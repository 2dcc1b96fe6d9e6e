"""Planted faults: each is one small change of the package that a named test must notice. ``python -m tests.mutants``
replays them.
"""
