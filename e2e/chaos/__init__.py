"""Chaos: random faults on a real cluster whose pods use devices, and a count of what leaks."""
