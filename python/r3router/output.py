"""What a command does when nobody reads its output any more."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def may_close() -> Iterator[None]:
    """Ends quietly with 1, as click does, when the reader of standard output has gone, as `head` does, and that shows at the end only."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would be tried again, and complained about, when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        sys.exit(1)
