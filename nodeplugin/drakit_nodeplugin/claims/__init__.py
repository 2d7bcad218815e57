"""
The life cycle of a claim on this node: allocation, batched prepare and unprepare, checkpoint, CDI
files.
"""
