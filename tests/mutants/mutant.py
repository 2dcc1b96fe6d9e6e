"""One planted fault, and how it gets into the source."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """Replace ``old`` by ``new`` in ``file`` (and every pair of ``also``); one of ``tests``, arguments of pytest, must
    then fail.

    ``breaks`` says what no longer holds under the fault.
    """

    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    breaks: str
    also: tuple[tuple[str, str], ...] = ()

    def planted(self, source: str) -> str:
        """``source`` of ``file`` with the fault. Raises ValueError when it has no single place there."""
        for old, new in ((self.old, self.new), *self.also):
            count = source.count(old)
            if count != 1:
                raise ValueError(
                    f"mutant {self.id} replaces text that occurs {count} times in {self.file}, not once: "
                    f"{old!r}. The code has changed; "
                    "plant the same fault in its new form in tests/mutants"
                )
            source = source.replace(old, new)
        return source
