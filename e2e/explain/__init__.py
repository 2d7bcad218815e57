"""Explanations, compared with the real scheduler: situations with their remedies."""
