"""
``resource.k8s.io`` as plain data: claims, node selectors and devices.

Pure functions over JSON as the API server gives it, projected to small frozen types. Everything
here follows ``resource.k8s.io/v1``.

It must not know clients, gRPC, files, or what is done with a claim.
"""
