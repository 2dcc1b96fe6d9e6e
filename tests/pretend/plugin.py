"""For ``pytest -p tests.pretend.plugin``: tests run on the device that pretends."""

from tests.pretend import device, group

__all__ = ["device", "group"]
