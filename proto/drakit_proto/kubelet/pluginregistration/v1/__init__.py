"""Registration, version v1, which is the only version that kubelets support."""
