"""Endpoints: connections to Python drivers, backends and device plugins."""
