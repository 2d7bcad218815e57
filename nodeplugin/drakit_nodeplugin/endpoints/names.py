"""
Names that vendors give, and that must be fit to be published.

It must not know where a name comes from, or what is done with one that is not fit.
"""

from __future__ import annotations

from typing import TypeGuard

from drakit.resource.device import is_dns_subdomain

__all__ = ("MAX_DRIVER_NAME", "MAX_PATH_BYTES", "is_driver_name")

MAX_DRIVER_NAME = 63

MAX_PATH_BYTES = 107
"""Bytes, not characters, that Linux takes for a unix socket's path: 108 with the closing NUL."""


def is_driver_name(name: object) -> TypeGuard[str]:
    """Tell whether this can be a driver's name: a DNS subdomain of at most 63 characters. It is the
    vendor in CDI names, too, and those begin with a letter."""
    return (
        isinstance(name, str)
        and is_dns_subdomain(name, max_length=MAX_DRIVER_NAME)
        and not name[0].isdigit()
    )
