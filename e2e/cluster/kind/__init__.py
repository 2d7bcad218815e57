"""Kubernetes in Docker: the provider `kind`, and the node image that it starts where no registry is."""
