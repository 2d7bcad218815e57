"""
The contracts as .proto files, and the stubs that are generated from them: those of the kubelet, and
drakit's own contract with backends.

Field numbers and service names are part of the wire format and never change. The .proto files
contain the comments. ``tools/generate_proto.py`` generates the stubs.
"""
