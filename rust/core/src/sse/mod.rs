//! Server-sent events cut out of a byte stream at any chunking, byte for byte.
