"""The health stream of kubelets since 1.37."""
