"""
``resource.k8s.io`` as plain data: claims, node selectors and devices.

Pure functions project the API server's JSON to small frozen types. Everything here follows
``resource.k8s.io/v1``.

Does not depend on clients, gRPC, or files.
"""
