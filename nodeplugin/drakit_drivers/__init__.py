"""The drivers that drakit includes. They use only the public API, and are found by entry point."""
