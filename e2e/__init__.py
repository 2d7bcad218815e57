"""Tests on a real cluster, and their base: clusters, images, the demo."""
