"""The health stream of kubelets from 1.34 on."""
