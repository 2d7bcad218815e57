"""The service in which the kubelet lists the devices of containers."""
