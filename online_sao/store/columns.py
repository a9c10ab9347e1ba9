"""Column types: what a value is in Python, and the one form it has in both databases."""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

_NOT_STORABLE = re.compile("[\\\\\x00\ud800-\udfff]")
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")


def escape_text(text: str) -> str:
    """`text` without NUL and lone surrogates, which PostgreSQL or UTF-8 refuse; reversible."""
    return _NOT_STORABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def unescape_text(stored: str) -> str:
    """What `escape_text` was given."""
    if "\\" not in stored:
        return stored
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), stored)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware time, in UTC both ways; a naive one is refused (SQLite would drop the zone)."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Aware -> UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a time without a zone cannot be stored: {value!r}")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """What the database gives -> aware UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Word(TypeDecorator[StrEnum]):
    """A member of one enum, stored as its word."""

    impl = sa.String(32)
    cache_ok = True

    def __init__(self, members: type[StrEnum]) -> None:
        super().__init__()
        self.members = members

    def process_bind_param(self, value: StrEnum | str | None, dialect: Dialect) -> str | None:
        """Member -> word; a word that is no member is refused."""
        return None if value is None else self.members(value).value

    def process_result_value(self, value: str | None, dialect: Dialect) -> StrEnum | None:
        """Word -> member."""
        return None if value is None else self.members(value)


class AnyText(TypeDecorator[str]):
    """Text that a client may have chosen: every Python string comes back as it was.

    Backslash, NUL and lone surrogates are written as `\\uXXXX`; all else stays readable.
    """

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Escape."""
        return None if value is None else escape_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """Unescape."""
        return None if value is None else unescape_text(value)


class JsonText(TypeDecorator[Any]):
    """Plain JSON as ASCII text, so that NUL and lone surrogates pass; NaN and inf allowed."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Dump; a Python None is an SQL NULL."""
        return None if value is None else json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Load."""
        return None if value is None else json.loads(value)


class PackedNumbers(TypeDecorator[tuple[Any, ...]]):
    """A tuple of numbers as its little-endian bytes.

    `i`: int32, 4 bytes. `d`: float64, 8 bytes, bit-exact. `f`: float32, 4 bytes, exact for what
    was computed in float32. `B`: booleans, 1 byte.
    """

    impl = sa.LargeBinary
    cache_ok = True

    def __init__(self, code: Literal["i", "d", "f", "B"]) -> None:
        super().__init__()
        self.code = code

    def process_bind_param(self, value: Sequence[Any] | None, dialect: Dialect) -> bytes | None:
        """Pack."""
        return None if value is None else pack(self.code, value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> tuple[Any, ...] | None:
        """Unpack."""
        return None if value is None else unpack(self.code, value)


def pack(code: str, numbers: Sequence[Any]) -> bytes:
    """The numbers' little-endian bytes; `code` as `PackedNumbers` names it."""
    packed = array(code, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(code: str, data: bytes) -> tuple[Any, ...]:
    """What `pack` was given."""
    packed = array(code)
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    if code == "B":
        return tuple(bool(byte) for byte in packed)
    return tuple(packed)
