"""Work under way: one noun for collectives, copies on side streams and file IO."""

from collections.abc import Iterable


class Transfer:
    """Bytes on their way; in this base class they have arrived.

    ``wait`` may be called any number of times and raises the failure; ``done`` says whether it would return at once;
    ``nbytes`` is the amount moved. The memory of a transfer stays alive and untouched by others until its end.
    """

    nbytes = 0

    def wait(self) -> None:
        """Wait until the transfer has ended."""

    def done(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return True

    def failed(self) -> bool:
        """Return whether the transfer has ended, and ``wait`` raises."""
        return False


class Several(Transfer):
    """Transfers that end together."""

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self._transfers = list(transfers)
        self.nbytes = sum(t.nbytes for t in self._transfers)

    def wait(self) -> None:
        """Wait until all have ended, also when one fails with OSError; raise the first such failure."""
        failure: OSError | None = None
        for transfer in self._transfers:
            try:
                transfer.wait()
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def done(self) -> bool:
        return all(t.done() for t in self._transfers)

    def failed(self) -> bool:
        return self.done() and any(t.failed() for t in self._transfers)


ARRIVED = Transfer()
