"""The node plugin: one daemon a node that serves the kubelet for any number of DRA drivers."""
