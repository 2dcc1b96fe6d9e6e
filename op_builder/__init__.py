"""Just-in-time builders of the native kernels.

There are none yet: kernels (CPU optimizer, asynchronous file IO, CUDA) and their builders come with a later part of the
project. Until then every operation runs on plain torch, and installing the package needs no compiler.
"""
