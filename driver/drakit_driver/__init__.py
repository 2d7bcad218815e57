"""``drakit-driver``: runs a Python driver in a separate process."""
