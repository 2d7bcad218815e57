"""Measurements. Each program prints one line a row, and fails when a budget is missed."""
