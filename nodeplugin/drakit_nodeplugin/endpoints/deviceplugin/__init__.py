"""Device plugins of the kubelet's kind, as endpoints of one driver."""
