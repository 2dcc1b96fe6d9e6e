"""Weights in and out: one file or several, of safetensors or of torch."""
