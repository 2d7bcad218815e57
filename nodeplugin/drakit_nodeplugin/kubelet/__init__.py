"""The kubelet-facing servers of a driver. They translate the kubelet's calls, and make no
decisions."""
