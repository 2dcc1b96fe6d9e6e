"""python -m tests.pretend FILE JOB ...   (cases.py), on the device: torch asks once what devices there are."""

import importlib

importlib.import_module("tests.pretend.device")
importlib.import_module("tests.pretend.cases").main()
