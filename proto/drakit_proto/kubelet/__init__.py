"""The kubelet's contracts with plugins: registration, and the calls after it."""
