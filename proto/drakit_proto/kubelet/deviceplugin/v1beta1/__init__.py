"""The kubelet's device plugin API, version v1beta1: the only one that there is."""
