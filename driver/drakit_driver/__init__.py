"""A Python driver in a process of its own: ``drakit-driver``."""
