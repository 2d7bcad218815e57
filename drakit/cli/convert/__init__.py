"""
``drakit convert``: policies of hostdev from the configuration of other device plugins.

One module reads the configuration of one tool; the others are shared.
"""
