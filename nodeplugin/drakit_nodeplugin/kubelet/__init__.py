"""The kubelet-facing servers of a driver: they translate its calls, and decide nothing."""
