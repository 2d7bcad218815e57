"""drakit's contract with backends, which are drivers in any language."""
