"""The device manager: the devices of each driver, and access to that driver."""
