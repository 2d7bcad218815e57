"""The connection to a Python driver, which runs in a thread and an event loop of its own."""
