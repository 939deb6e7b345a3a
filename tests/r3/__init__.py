"""R3 by reference: files, references, client and agent."""
