"""Packs devices into ResourceSlices, and publishes them."""
