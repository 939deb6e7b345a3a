"""The sink: puts rows that a reference names into another store, and answers with that store's own reference."""
