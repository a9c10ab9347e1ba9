"""Ids to text, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from online_sao.engines.embedded.detokenize import Detokenizer, byte_alphabet


def from_bytes(ids: Sequence[int]) -> str:
    """A tokenizer whose ids are bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def from_words(ids: Sequence[int]) -> str:
    """A tokenizer that drops the first token's leading space, as SentencePiece ones do."""
    return "".join(f" w{i}" for i in ids).removeprefix(" ")


def joined(decode: object, ids: Sequence[int]) -> str:
    detokenizer = Detokenizer(decode)  # type: ignore[arg-type]
    return "".join(detokenizer.push(i) for i in ids)


def test_an_emoji_of_four_bytes_comes_with_its_last_byte() -> None:
    detokenizer = Detokenizer(from_bytes)
    assert [detokenizer.push(b) for b in "\U0001f600".encode()] == ["", "", "", "\U0001f600"]


@given(st.text(max_size=120))
def test_chunks_join_to_the_text_and_hold_no_replacement_character(text: str) -> None:
    detokenizer = Detokenizer(from_bytes)
    chunks = [detokenizer.push(b) for b in text.encode()]
    kept = "".join(chunks)
    held = len(text) - len(text.rstrip("\ufffd"))
    assert text.startswith(kept)
    assert len(text) - len(kept) <= min(held, 3)  # only a literal U+FFFD at the end may wait
    if "\ufffd" not in text:
        assert "\ufffd" not in kept


def test_broken_bytes_are_shown_once_they_cannot_become_a_character() -> None:
    assert joined(from_bytes, [0xFF, *b"ok"]) == "\ufffdok"
    assert joined(from_bytes, [0x80] * 9) == "\ufffd" * 6  # three may still be waiting


def test_a_long_text_keeps_its_spaces_though_only_its_end_is_decoded_again() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return from_words(ids)

    ids = list(range(500))
    assert joined(decode, ids) == from_words(ids)
    assert longest < 60


def test_half_a_character_at_the_end_is_dropped() -> None:
    assert joined(from_bytes, [*b"hi", 0xF0, 0x9F]) == "hi"


@pytest.mark.parametrize(
    ("char", "byte"), [("A", 65), ("\u0120", 32), ("\u010a", 10), ("\u00e9", 0xE9)]
)
def test_the_byte_alphabet_is_gpt2s(char: str, byte: int) -> None:
    assert byte_alphabet()[char] == byte
    assert sorted(byte_alphabet().values()) == list(range(256))
