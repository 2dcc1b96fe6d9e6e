"""One test of a cheap check over many values, which fails with the list of all values that fail."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def for_each(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Check every row in one test. Arguments are those of ``pytest.mark.parametrize``, the check takes no fixture."""
    rows = list(rows)
    single = isinstance(names, str) and "," not in names

    def folded(check: Callable[..., None]) -> Callable[[], None]:
        def test() -> None:
            assert rows, "there is nothing to check"
            failures = []
            for row in rows:
                try:
                    check(*((row,) if single else row))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{row!r}: {type(error).__name__}: {error}")
            if failures:
                pytest.fail(f"{len(failures)} of {len(rows)} rows:\n" + "\n".join(failures))

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return folded
