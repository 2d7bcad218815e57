"""The kubelet's device plugin API, as plugins know it."""
