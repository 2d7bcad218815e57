"""The kubelet's device plugin API, version v1beta1, which is the only version."""
