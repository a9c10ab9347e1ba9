"""From token ids to text, a token at a time: whole characters only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
MAX_HELD = 3
"""A UTF-8 character has 4 bytes at most, so at most 3 of them can wait for the rest."""
REBASE_AFTER = 24


class Detokenizer:
    """Text of a growing list of ids. What was given out once is never taken back.

    A trailing U+FFFD may be the first bytes of a character whose rest comes with the next token:
    it is held. A longer run than any character has bytes is broken text and is given out.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0
        """Characters of the window's text that were given out."""
        self._clean = 0
        """Length of the window when last all of its text was whole."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; may be empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        held = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_HELD)
        whole = len(text) - held
        new, self._given = text[self._given : whole], max(self._given, whole)
        if held == 0:
            self._rebase()
        return new

    def _rebase(self) -> None:
        """Keep the window short: start it at the last whole place before this one.

        The tokens since then stay as context, since some tokenizers drop a leading space.
        """
        before, self._clean = self._clean, len(self._window)
        if len(self._window) > REBASE_AFTER and before > 0:
            self._window = self._window[before:]
            self._clean = len(self._window)
            self._given = len(self._decode(self._window))


class Vocabulary:
    """One tokenizer: decode ids, and each token's own text and bytes (cached)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._special = set(tokenizer.all_special_ids)
        self._cache: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._alphabet = byte_alphabet() if self._is_byte_level() else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=True))
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def token(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        """One token as text, and its exact bytes where the tokenizer is byte-level."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._token(token_id)
        return known

    def _token(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if token_id in self._special:
            return piece, tuple(piece.encode())
        text = self.decode([token_id])
        if self._alphabet is not None and all(char in self._alphabet for char in piece):
            return text, tuple(self._alphabet[char] for char in piece)
        return text, tuple(text.encode("utf-8", errors="replace"))

    def _is_byte_level(self) -> bool:
        return self._backend is not None and "ByteLevel" in repr(self._backend.decoder)


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}
