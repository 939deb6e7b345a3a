"""`r3router agent`: serves the payload files of an engine's host to clients and routers on others, and cleans up after them."""
