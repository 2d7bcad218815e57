"""
Contracts with the kubelet, as .proto files of our own and the stubs generated from them.

Field numbers and service names are the wire's and never change; the comments are in the .proto
files. ``tools/generate_proto.py`` makes the stubs.

It must not know who uses them.
"""
