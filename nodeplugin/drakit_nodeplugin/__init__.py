"""The node plugin: one daemon per node that serves the kubelet for any number of DRA drivers."""
