"""Native ops: plain C++ and CUDA sources compiled on first use, cached, and loaded with ctypes; no torch headers
anywhere.
"""
