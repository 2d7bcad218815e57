"""
The claim life cycle on this node: allocation, batched prepare and unprepare, checkpoint, CDI files.
"""
