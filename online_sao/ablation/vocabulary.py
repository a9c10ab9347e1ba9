"""The tiny policy's own tokens: digits, operators and the marks of calls and observations."""

from __future__ import annotations

import re
from collections.abc import Iterable

PAD, BOS, END = "<pad>", "<bos>", "<end>"
CALL, CALL_END = "<call>", "</call>"
OBSERVATION, OBSERVATION_END = "<obs>", "</obs>"
ERROR = "<error>"
FILLER = "."

TOKENS = (
    PAD, BOS, END, CALL, CALL_END, OBSERVATION, OBSERVATION_END, ERROR, FILLER,
    "=", "+", "-", "*", *"0123456789",
)  # fmt: skip
_IDS = {token: number for number, token in enumerate(TOKENS)}
_PIECES = re.compile(r"</?[a-z]+>|.", re.DOTALL)


def encode(text: str) -> tuple[int, ...]:
    """The ids of `text`: a mark like `<call>` is one token, so is any other character.

    Raises KeyError for what is no token.
    """
    return tuple(_IDS[piece] for piece in _PIECES.findall(text))


def decode(ids: Iterable[int]) -> str:
    """The text of `ids`."""
    return "".join(TOKENS[number] for number in ids)


def id_of(token: str) -> int:
    """The id of one token."""
    return _IDS[token]
