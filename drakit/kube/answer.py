"""
The body of an answer: read up to a bound, and parsed.

It must not know connections and timeouts: the chunks are handed in.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import Any, cast

import orjson

from drakit.kube.errors import UnreadableError

__all__ = ("Answer", "read_answer")

MAX_ANSWER_BYTES = 32 * 2**20
"""Bytes of an answer, if the caller names no other bound."""


_MANAGERS = b',"managedFields":['
"""The last field of an object's metadata (ObjectMeta). Its writers can nest it at will, because the
API server keeps it as it comes. Within a JSON string these quotes would be escaped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A JSON object, and how many bytes it had."""

    body: dict[str, Any]
    size_bytes: int = 0


async def read_answer(
    chunks: AsyncIterable[bytes],
    *,
    method: str,
    path: str,
    max_bytes: int | None = None,
    one_metadata: bool = False,
) -> Answer:
    """
    Read an answer; UnreadableError if it is too large, or is no JSON object.

    With `one_metadata` it is a list of the metadata of one object at most, whose `managedFields`
    are dropped before they are parsed.
    """
    bound = max_bytes or MAX_ANSWER_BYTES
    answer = bytearray()
    async for chunk in chunks:
        answer += chunk
        if len(answer) > bound:
            why = f"it has more than {bound} bytes"
            raise UnreadableError.no_answer(method, path, why=why)
    if one_metadata and (end := answer.find(_MANAGERS)) >= 0:
        answer[end:] = b"}}]}"  # of the metadata, the object, the items and the list
    try:
        parsed: Any = orjson.loads(answer) if answer else {}
    except orjson.JSONDecodeError as error:
        why = f"it cannot be parsed ({error.msg})"
        raise UnreadableError.no_answer(method, path, why=why) from None
    if not isinstance(parsed, dict):
        why = "it is no JSON object; is a proxy in between?"
        raise UnreadableError.no_answer(method, path, why=why)
    return Answer(body=cast("dict[str, Any]", parsed), size_bytes=len(answer))
