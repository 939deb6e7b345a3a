"""R3 by reference: the files that hold rows, the references to them, and how they become arrays.

`Header` is the file's, `Descriptor` an engine's, `Reference` a reply's. `r3router.client` uses all three; `Reader` alone serves
trainer ranks that were handed a reference.
"""

from .descriptor import Descriptor
from .errors import AccessDenied, FetchFailed, FormatError, R3Error, RowsGone
from .format import Header, narrow_dtype
from .local import open_rows
from .reference import Reference, Segment

__all__ = [
    "AccessDenied",
    "Descriptor",
    "FetchFailed",
    "FormatError",
    "Header",
    "R3Error",
    "Reference",
    "RowsGone",
    "Segment",
    "narrow_dtype",
    "open_rows",
]
