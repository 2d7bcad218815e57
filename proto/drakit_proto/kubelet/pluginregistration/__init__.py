"""The registration of plugins with the kubelet."""
