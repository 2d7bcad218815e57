"""drakit's verdicts beside those of the scheduler's own allocator, over random clusters."""
