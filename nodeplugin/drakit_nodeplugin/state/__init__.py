"""The checkpoint: the claims that this node has prepared, kept in a SQLite database."""
