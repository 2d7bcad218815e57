"""The kubelet-facing servers of a driver. They translate its calls, and make no decisions."""
