"""The drivers that drakit ships. They use only the public API, and are found by entry point."""
