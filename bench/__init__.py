"""Measurements: `python -m bench` prints one line per row, and fails if a budget is exceeded."""
