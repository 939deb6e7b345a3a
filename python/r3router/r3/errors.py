"""What can go wrong between a reference and its rows. Each error says which address, and what was expected and found."""


class R3Error(Exception):
    """Rows of a payload could not be had as they were promised."""


class FormatError(R3Error):
    """Bytes, a header or a reference are not as the format says; reading on would give wrong rows."""


class RowsGone(R3Error):
    """Nobody holds the rows any more: they were released (404) or their time is over (410). The sample must be made again."""


class AccessDenied(R3Error):
    """The owner of the rows refuses this key (401, 403)."""


class FetchFailed(R3Error):
    """The owner of the rows could not be reached, broke off, or failed. The same fetch may succeed later."""
