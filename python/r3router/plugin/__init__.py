"""Plug-in of SGLang (entry point group `sglang.srt.plugins`): R3 rows leave the engine by reference.

In the scheduler's process, the rows of a finished request are gathered from the engine's host buffer by a thread, narrow, into a
file in shared memory; a tensor of about 200 bytes with the file's address takes their place in the reply and travels through the
unmodified pickle, base64 and JSON. Whatever is unknown or fails leaves the engine as it was: rows in-line, and a line in the log.
"""

from .hooks import register

__all__ = ["register"]
