"""
Contracts as .proto files and the stubs generated from them: the kubelet's, and ours with backends.

Field numbers and service names are the wire's and never change; the comments are in the .proto
files. ``tools/generate_proto.py`` makes the stubs.
"""
