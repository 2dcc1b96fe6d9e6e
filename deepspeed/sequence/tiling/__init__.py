"""Less memory for long sequences: work by tiles, and activations in host memory."""
