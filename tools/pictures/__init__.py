"""The terminal pictures of the documentation: recorded on a real cluster, and drawn as SVG."""
