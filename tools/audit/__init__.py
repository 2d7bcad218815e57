"""Checks of what the project uses: the workflows of CI, and requirements with vulnerabilities."""
