"""
Names: from a device plugin's IDs and resource names to those of devices and pools, and back.

A device's name is a DNS label, an ID is any text. An ID that is a label stays as it is; in others,
what a label cannot hold is escaped, so that people still read them:

    video-0         video-0
    0000:01:00.0    0000--k01--k00--p0
    GPU-8f4c        x--ygpu-8--nf4c

An escape is ``--`` and a letter of :data:`_LETTERS`, or ``--`` and two hexadecimal digits for each
byte in UTF-8; ``--y`` begins capital letters and ``--n`` ends them. What would begin with an escape
has an ``x`` before it. An ID that does not fit so becomes a readable beginning, ``--j`` and a
hash: which one it was, the list of the present devices tells. No two IDs have one name.

It must not know the plugins' protocol, or what is done with a name.
"""

from __future__ import annotations

import base64
import hashlib
import re

from drakit.resource.limits import MAX_STRING_BYTES
from drakit.resource.names import is_dns_label, is_dns_subdomain

__all__ = (
    "MAX_DEVICE_ID",
    "device_id",
    "device_name",
    "pool_of",
    "resource_name_problem",
    "resource_of",
)

MAX_DEVICE_ID = 256
"""Characters of an ID; the kubelet documents 63 and enforces nothing."""

MAX_NAME = 63
MAX_POOL = 160
"""Characters of a pool's name: those of a node go before it, and 253 is the limit of both."""

_LETTERS = {".": "p", ":": "k", "/": "s", "_": "u", " ": "w", "-": "h"}
_TEXTS = {letter: text for text, letter in _LETTERS.items()}
_UPPER, _LOWER, _HASH = "y", "n", "j"

_HASH_CHARACTERS = 26
"""130 bits in base32."""

_PLAIN = re.compile(r"[a-z0-9]")
_ESCAPE = re.compile(r"--([g-z]|[0-9a-f]{2})")
_NAME_PART = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_QUOTA_PREFIX = "requests."
"""What Kubernetes puts before an extended resource's name in quotas; it is checked with it."""


# ------------------------------------------------------------ devices


def device_name(device_id: str) -> str:
    """Give the name of the device with this ID: a DNS label, the same at all times."""
    if is_dns_label(device_id) and "--" not in device_id:
        return device_id
    escaped = _escaped(device_id)
    return escaped if len(escaped) <= MAX_NAME else _hashed(device_id)


def device_id(name: str) -> str | None:
    """Give the ID that has this name; None if the name holds its hash, or is no ID's at all."""
    if not is_dns_label(name):
        return None
    if "--" not in name:
        return name
    text = _unescaped(name.removeprefix("x") if name.startswith("x--") else name)
    return text if text is not None and device_name(text) == name else None


def _escaped(text: str) -> str:
    parts: list[str] = []
    upper = False
    for index, character in enumerate(text):
        lower = character.lower()
        letter = _PLAIN.fullmatch(lower) is not None and character.isascii()
        if letter and not character.isdigit() and (character != lower) != upper:
            upper = not upper
            parts.append(f"--{_UPPER if upper else _LOWER}")
        if letter:
            parts.append(lower)
        elif character == "-" and index > 0 and _stays(text[index + 1 :], upper=upper):
            parts.append(character)
        elif character in _LETTERS:
            parts.append(f"--{_LETTERS[character]}")
        else:
            parts += [f"--{byte:02x}" for byte in character.encode("utf-8", "surrogatepass")]
    escaped = "".join(parts)
    if escaped.startswith("--"):
        return f"x{escaped}"
    # A text that has an x of its own there.
    return f"x--{_LOWER}{escaped}" if escaped.startswith("x--") else escaped


def _stays(rest: str, *, upper: bool) -> bool:
    """Tell whether a hyphen stays one: only where no escape follows, and it is not the last."""
    following = rest[:1]
    if not following or not following.isascii() or not _PLAIN.fullmatch(following.lower()):
        return False
    return following.isdigit() or following.isupper() == upper


def _unescaped(name: str) -> str | None:
    content = bytearray()
    upper, at = False, 0
    while at < len(name):
        escape = _ESCAPE.match(name, at)
        if escape is None:
            if name.startswith("--", at):
                return None
            content += (name[at].upper() if upper else name[at]).encode()
            at += 1
            continue
        code, at = escape[1], escape.end()
        if len(code) == 2:
            content.append(int(code, 16))
        elif code in (_UPPER, _LOWER):
            upper = code == _UPPER
        elif code in _TEXTS:
            content += _TEXTS[code].encode()
        else:
            return None
    try:
        return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None


def _hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    code = base64.b32encode(digest).decode().lower()[:_HASH_CHARACTERS]
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    slug = slug[: MAX_NAME - len(code) - 3].rstrip("-") or "x"
    return f"{slug}--{_HASH}{code}"


# ------------------------------------------------------------ resources


def resource_name_problem(name: str) -> str | None:
    """Say why this is no name of an extended resource, as the kubelet sees it, or none that can be
    an attribute; None if it is one."""
    domain, slash, part = name.partition("/")
    if not slash:
        return "it must have a domain and '/' before it, as in vendor.example/thing"
    if domain.endswith("kubernetes.io"):
        return "domains that end in kubernetes.io are Kubernetes' own"
    if domain.startswith(_QUOTA_PREFIX):
        return f"a domain that begins with '{_QUOTA_PREFIX}' is for quotas"
    if not is_dns_subdomain(_QUOTA_PREFIX + domain):
        return "what stands before '/' must be a DNS subdomain of at most 244 characters"
    if len(part) > MAX_NAME or not _NAME_PART.fullmatch(part):
        return (
            "what stands behind '/' must be of at most 63 letters, digits, '-', '_' and '.', and "
            "begin and end with a letter or digit"
        )
    if len(name) > MAX_STRING_BYTES:
        return (
            f"it must have at most {MAX_STRING_BYTES} characters with its domain: it is an "
            f"attribute of its devices, by which classes choose them"
        )
    return None


def pool_of(resource: str) -> str:
    """Name the pool of a resource: ``thing.vendor.example`` for ``vendor.example/thing``."""
    domain, _, part = resource.partition("/")
    pool = f"{device_name(part)}.{domain}"
    return pool if len(pool) <= MAX_POOL else _hashed(resource)


def resource_of(pool: str) -> str | None:
    """Give the resource that has this pool; None if its name holds a hash, or is no resource's."""
    label, _, domain = pool.partition(".")
    part = device_id(label)
    resource = f"{domain}/{part}"
    return resource if domain and part is not None and pool_of(resource) == pool else None
