"""
The driver runtime: runs a driver class in a thread, for the node plugin and ``drakit-driver``.
"""
