"""The device manager: which devices there are, and the way to the driver that has them."""
