"""Explanations beside the real scheduler: situations with their remedies."""
