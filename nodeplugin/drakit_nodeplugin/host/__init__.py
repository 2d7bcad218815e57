"""One hosted driver, all of them, and what looks after their claims."""
