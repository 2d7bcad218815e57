"""The health stream of kubelets from 1.34 to 1.39."""
