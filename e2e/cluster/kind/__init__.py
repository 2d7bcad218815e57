"""Kubernetes in Docker: the provider `kind`, and a node image that needs no registry."""
