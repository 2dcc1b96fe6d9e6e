"""What the mutants of order are: which case sees that a call is missing, and why nothing can see it of the others."""

SEEN: dict[str, str] = {}
UNSEEN: dict[str, str] = {}
# Modules whose waits order no accesses of streams: the beginning of their names -> what they wait for.
OUTSIDE: dict[str, str] = {"simulate": "the simulator itself"}
