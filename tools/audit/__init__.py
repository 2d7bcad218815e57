"""Checks of the workflows of CI, and of the requirements for known vulnerabilities."""
