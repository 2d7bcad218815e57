"""One claim's life on this node: allocation, batch prepare and unprepare, checkpoint, CDI files."""
