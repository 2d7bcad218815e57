"""The connection to a Python driver, which runs in its own thread and event loop."""
