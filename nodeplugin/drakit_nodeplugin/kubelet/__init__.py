"""The front door of a driver: it translates the kubelet's calls, and decides nothing."""
