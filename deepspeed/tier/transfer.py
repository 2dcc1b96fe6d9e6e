"""Work under way: one noun for collectives, copies on side streams and file IO."""

from collections.abc import Iterable


class Transfer:
    """Bytes on their way. This one has arrived.

    ``wait`` may be called any number of times and raises what went wrong; ``done`` says whether it would return at
    once; ``nbytes`` is the price. What the transfer reads or writes stays alive and untouched by others until then.
    """

    nbytes = 0

    def wait(self) -> None:
        """Until it has ended."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return True

    def failed(self) -> bool:
        """Whether it has ended, and ``wait`` raises."""
        return False


class Several(Transfer):
    """Transfers that end together."""

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self._transfers = list(transfers)
        self.nbytes = sum(t.nbytes for t in self._transfers)

    def wait(self) -> None:
        """Until all have ended, also when one fails; raises the first failure."""
        failure: BaseException | None = None
        for transfer in self._transfers:
            try:
                transfer.wait()
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def done(self) -> bool:
        return all(t.done() for t in self._transfers)


ARRIVED = Transfer()
