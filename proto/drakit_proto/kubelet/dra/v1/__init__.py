"""The DRA service of kubelets from 1.34 on."""
