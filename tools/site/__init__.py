"""The documentation site: sources, build, checks, versions and browser check."""
