"""
What tests of drivers are made of: a kubelet, an API server and the conformance kit.

They must not be imported by anything that runs on a node.
"""
