"""
The runtime of drivers: runs a driver's class in a thread, for the node plugin and
``drakit-driver``.
"""
