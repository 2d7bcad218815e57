"""
API limits for slices: names (labels, subdomains, C identifiers, label keys and values, extended
resources) and numbers.

The modules that check objects know the kind of each name. Messages describe the problem without
repeating the name, so that callers can append them to any field. The numbers are those of
``resource.k8s.io/v1`` in Kubernetes 1.36 and 1.37. For the fields that drakit publishes, the limits
of earlier versions are not lower.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TypeGuard

# ---------------------------------------------------------------- names

MAX_LABEL_LENGTH = 63
MAX_SUBDOMAIN_LENGTH = 253
MAX_DOMAIN_LENGTH = 63
"""Maximum length of an attribute's domain, which is lower than for other subdomains."""
MAX_IDENTIFIER_LENGTH = 32
MAX_DRIVER_NAME = 63

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_QUOTA_PREFIX = "requests."


def is_dns_label(text: str) -> bool:
    """Return whether a string is a DNS label of at most 63 characters (RFC 1123)."""
    return len(text) <= MAX_LABEL_LENGTH and _LABEL.fullmatch(text) is not None


def is_dns_subdomain(text: str, *, max_length: int = MAX_SUBDOMAIN_LENGTH) -> bool:
    """Return whether a string is a DNS subdomain: labels joined by dots."""
    return len(text) <= max_length and _SUBDOMAIN.fullmatch(text) is not None


def is_driver_name(name: object) -> TypeGuard[str]:
    """Return whether a name is a valid driver name: a DNS subdomain of at most 63 characters that
    begins with a letter, because it is also the vendor part of CDI names."""
    return (
        isinstance(name, str)
        and is_dns_subdomain(name, max_length=MAX_DRIVER_NAME)
        and not name[0].isdigit()
    )


# Cache the results, because thousands of devices use the same few attribute and capacity names.
@lru_cache(maxsize=1024)
def qualified_name_problem(name: str) -> str | None:
    """Return the problem with the name of an attribute or a capacity (API: ``QualifiedName``)."""
    domain, slash, identifier = name.rpartition("/")
    if slash and not is_dns_subdomain(domain, max_length=MAX_DOMAIN_LENGTH):
        return "has a domain that is not a DNS subdomain of at most 63 characters"
    if len(identifier) > MAX_IDENTIFIER_LENGTH or not _IDENTIFIER.fullmatch(identifier):
        return f"is not a C identifier of at most {MAX_IDENTIFIER_LENGTH} characters"
    return None


@lru_cache(maxsize=1024)
def label_key_problem(key: str, *, needs_domain: bool = True) -> str | None:
    """Return the problem with a label key, or with a condition type, which has the same form."""
    prefix, slash, name = key.partition("/")
    if not slash:
        if needs_domain:
            return "has no domain before it (such as camera.example.com/lens)"
        return label_value_problem(key) if key else "is empty"
    if not is_dns_subdomain(prefix):
        return "has a domain that is not a DNS subdomain of at most 253 characters"
    if problem := label_value_problem(name) if name else "is empty":
        return f"has a name after the slash that {problem}"
    return None


def label_value_problem(value: str) -> str | None:
    """Return the problem with a label value, which may be empty."""
    if not value or (len(value) <= MAX_LABEL_LENGTH and _LABEL_VALUE.fullmatch(value)):
        return None
    return (
        f"is not a label value: at most {MAX_LABEL_LENGTH} letters, digits, '-', '_' and '.', "
        f"with a letter or digit at both ends"
    )


def extended_resource_problem(name: str) -> str | None:
    """Return the reason why a name is not a valid extended resource name by the kubelet's rules, or
    None."""
    domain, slash, part = name.partition("/")
    if not slash:
        return "it must begin with a domain and '/', for example vendor.example/thing"
    if domain.endswith("kubernetes.io"):
        return "domains that end in kubernetes.io are reserved for Kubernetes"
    if domain.startswith(_QUOTA_PREFIX):
        return f"a domain that begins with '{_QUOTA_PREFIX}' is for quotas"
    if not is_dns_subdomain(_QUOTA_PREFIX + domain):
        return "the part before '/' must be a DNS subdomain of at most 244 characters"
    if not part or label_value_problem(part):
        return (
            "the part after '/' must have at most 63 letters, digits, '-', '_' and '.', and "
            "begin and end with a letter or digit"
        )
    return None


# ---------------------------------------------------------------- numbers

MAX_TAINTED_DEVICES_PER_SLICE = 64
"""Maximum number of devices in a slice if any of them has taints, consumes counters or has a list
attribute. Otherwise, the maximum is 128."""

MAX_COUNTER_SETS_PER_SLICE = 8
MAX_COUNTERS = 32
"""Maximum number of counters in a counter set, and of counters that a device consumes from one
set."""

MAX_CONSUMED_COUNTER_SETS = 2
"""Maximum number of counter sets from which a device consumes."""

MAX_ATTRIBUTES_AND_CAPACITIES = 32
"""Maximum number of attributes and capacities of a device together, including topology
attributes."""

MAX_ATTRIBUTE_VALUES = 48
"""Maximum number of attribute values of a device, including each value in a list."""

MAX_STRING_BYTES = 64
"""Maximum size of a string or version attribute, in bytes."""

MAX_VALID_VALUES = 10
"""Maximum number of valid amounts of a capacity for a claim to choose from."""

MAX_COMPATIBILITY_GROUPS = 2
"""Maximum number of compatibility groups of a device for each counter set."""

MAX_BINDING_CONDITIONS = 4
"""Maximum number of a device's binding conditions, and of its binding failure conditions."""

MAX_NODE_RESOURCES = 16
"""Maximum number of node resources that a device maps. The API does not have a limit, but a node
has few resources."""

MAX_EXTRA_BYTES = 4096
"""Maximum size of a device's extra fields, as JSON, in bytes. 64 such devices take a sixth of the
largest object."""

MAX_EXTRA_DEPTH = 5
"""Maximum nesting depth of extra fields."""

MAX_DRIVER_TAINTS = 12
"""Maximum number of taints from the driver. The rest of the API's limit is reserved for the node
plugin."""

MAX_POOLS = 64
"""Maximum number of pools in one inventory. The API does not have a limit, but each pool costs
objects and requests."""

MAX_POOL_NAME_LENGTH = 253
