"""The one place that holds the version number (PEP 440)."""

__version__ = "1.0.0a1"
