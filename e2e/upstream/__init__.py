"""
Kubernetes' own end-to-end tests of DRA, run on a cluster on which drakit is installed.

`python -m e2e.upstream` is `make upstream-e2e`. The suite is Kubernetes' code, built from its Go
modules (`suite/`); nothing here changes what a spec checks.
"""
