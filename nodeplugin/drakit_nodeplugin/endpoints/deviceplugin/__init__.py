"""Kubelet device plugins, as endpoints of one driver."""
