"""From devices to ResourceSlices: packing and publishing."""
