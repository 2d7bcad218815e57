"""Situations as data: the pods of each, what drakit says of them, and what ends them."""
