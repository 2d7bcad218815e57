"""The drivers that are included in drakit. They use only the public API, and are found by entry
point."""
