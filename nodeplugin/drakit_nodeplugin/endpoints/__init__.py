"""Live connections to sources of devices; today Python drivers, each in a thread of its own."""
