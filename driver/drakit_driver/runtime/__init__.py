"""The runtime of drivers: runs a class in its thread, for the node plugin and ``drakit-driver``."""
