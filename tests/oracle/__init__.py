"""drakit's verdicts beside the scheduler's own allocator, over random clusters and its tables."""
