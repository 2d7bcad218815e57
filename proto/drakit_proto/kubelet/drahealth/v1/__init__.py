"""The health stream of kubelets from 1.37 on."""
