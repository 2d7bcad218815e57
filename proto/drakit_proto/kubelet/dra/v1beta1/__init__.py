"""The DRA service of kubelets 1.32 and 1.33: v1 without shares."""
