"""The backend contract, version 1."""
