"""How many fields a protobuf message has, all nested ones included, counted before it is parsed.

Two bytes may be a message of a hundred in memory, so a body within the limit on its size could still fill the memory,
and keep a thread busy for minutes.
"""

from __future__ import annotations

from functools import lru_cache

from google.protobuf.descriptor import Descriptor

_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = 0, 1, 2, 3, 4, 5


@lru_cache(maxsize=32)
def _messages_of(descriptor: Descriptor) -> dict[int, Descriptor]:
    """By field number, the types of the fields that are messages themselves."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


def exceeds_fields(body: bytes, descriptor: Descriptor, limit: int) -> bool:
    """Whether `body`, read as a message of `descriptor`, has more than `limit` fields. Where it is no such message,
    counting ends: a parser gets no further."""
    count, pending = 0, [(0, len(body), descriptor)]
    while pending:
        at, end, kind = pending.pop()
        messages = _messages_of(kind)
        while at < end:
            count += 1
            if count > limit:
                return True
            tag, at = (body[at], at + 1) if body[at] < 128 else _varint(body, at, end)
            wire_type = tag & 7
            if wire_type == _BYTES:
                size, at = _varint(body, at, end)
                if (nested := messages.get(tag >> 3)) is not None and at + size <= end:
                    pending.append((at, at + size, nested))
                at += size
            elif wire_type == _VARINT:
                _, at = _varint(body, at, end)
            elif wire_type in (_FIXED32, _FIXED64):
                at += 4 if wire_type == _FIXED32 else 8
            elif wire_type not in (_GROUP, _GROUP_END):  # what a group holds is counted like what surrounds it
                break
    return False


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return value, end
