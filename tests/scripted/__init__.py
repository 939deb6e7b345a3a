"""Scripted SGLang engines: byte-exact, on raw sockets, in the test's own event loop. See README.md of `tests/cases`."""
