"""Measurements: `python -m bench` prints one line a row, and fails when a budget is missed."""
