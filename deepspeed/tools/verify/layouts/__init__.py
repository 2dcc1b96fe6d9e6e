"""The gates of how ranks are laid out: pipelines, tensor-parallel parts, experts."""
