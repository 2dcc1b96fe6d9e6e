"""Sequences of mixed lengths: packed, and dealt to ranks that share the long ones."""
