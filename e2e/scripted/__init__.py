"""
A driver whose behavior a test writes into a file, its image, and the tests' side of that file.

`image/` contains the same files as a vendor's project: a module with drivers, and a Dockerfile
based on the node plugin's image. It imports only `drakit` and the standard library.
"""

from pathlib import Path

IMAGE = Path(__file__).with_name("image")
"""The content of the drivers' image."""
