"""
A driver whose behaviour a test writes into a file, its image, and the tests' side of that file.

`image/` is what a vendor would have: a module with drivers, and a Dockerfile on the node plugin's
image. It imports nothing but `drakit` and the standard library.
"""

from pathlib import Path

IMAGE = Path(__file__).with_name("image")
"""The content of the drivers' image."""
