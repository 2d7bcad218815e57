"""The DRA service of kubelets since 1.34."""
