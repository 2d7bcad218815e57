"""The checkpoint: the claims that this node has prepared, stored in a SQLite database."""
