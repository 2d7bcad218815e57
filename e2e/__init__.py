"""Tests on a real cluster, and what they stand on: clusters, images, the demo."""
