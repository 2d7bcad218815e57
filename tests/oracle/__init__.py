"""
Compares drakit's verdicts with the scheduler's own allocator, for random clusters and its tables.
"""
