"""The kubelet's podresources API, version v1."""
