"""Registration, the only version that kubelets speak."""
