"""
Endpoints in other processes: connections to backends and device plugins, and their permissions.
"""
