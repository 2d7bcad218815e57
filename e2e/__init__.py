"""Tests on a real cluster, and their infrastructure: clusters, images, the demo."""
