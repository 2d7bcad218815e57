"""The device manager: tracks the devices of each driver, and provides access to the driver."""
