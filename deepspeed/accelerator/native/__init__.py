"""Native ops: plain C++ and CUDA sources compiled on first use, cached, loaded with ctypes; no torch headers."""
