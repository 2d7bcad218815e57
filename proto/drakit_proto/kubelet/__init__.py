"""The kubelet's contracts with plugins: how one registers, and what it is asked afterwards."""
