"""What a value looks like in the database, and that it comes back."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from online_sao.store.columns import (
    AnyText,
    JsonText,
    PackedNumbers,
    UtcDateTime,
    Word,
    escape_text,
    pack,
    unescape_text,
    unpack,
)
from online_sao.types import LedgerState

DIALECT = sa.create_engine("sqlite://").dialect


@given(st.text(st.characters(codec=None)))
def test_any_text_survives_and_is_fit_for_both_databases(text: str) -> None:
    stored = escape_text(text)
    assert "\x00" not in stored
    stored.encode()
    assert unescape_text(stored) == text


def test_only_backslash_nul_and_lone_surrogates_are_escaped() -> None:
    assert escape_text("天 🙂 'x'\n") == "天 🙂 'x'\n"
    assert escape_text("\\ \x00 \ud800") == r"\u005c \u0000 \ud800"
    assert unescape_text(r"\u005cu0000") == r"\u0000"


def test_text_that_is_absent_stays_absent() -> None:
    for column in (AnyText(), JsonText(), UtcDateTime(), PackedNumbers("i"), Word(LedgerState)):
        assert column.process_bind_param(None, DIALECT) is None
        assert column.process_result_value(None, DIALECT) is None


def test_json_is_plain_ascii() -> None:
    column = JsonText()
    assert column.process_bind_param({"a": ["天\x00\ud800"]}, DIALECT) == (
        r'{"a":["\u5929\u0000\ud800"]}'
    )
    assert column.process_result_value(r'"\u0000\ud800"', DIALECT) == "\x00\ud800"
    assert math.isnan(column.process_result_value("NaN", DIALECT))


def test_a_naive_time_is_refused_and_an_aware_one_is_written_in_utc() -> None:
    column = UtcDateTime()
    with pytest.raises(ValueError, match="without a zone"):
        column.process_bind_param(datetime(2026, 3, 1, 12), DIALECT)
    east = timezone(timedelta(hours=9))
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert column.process_bind_param(datetime(2026, 3, 1, 21, tzinfo=east), DIALECT) == noon
    assert column.process_result_value(datetime(2026, 3, 1, 12), DIALECT) == noon
    given_back = column.process_result_value(datetime(2026, 3, 1, 21, tzinfo=east), DIALECT)
    assert given_back is not None
    assert (given_back, given_back.tzinfo) == (noon, UTC)


def test_numbers_are_little_endian_bytes() -> None:
    assert pack("i", (1, -2)) == bytes.fromhex("01000000 feffffff")
    assert pack("d", (-0.5,)) == bytes.fromhex("000000000000e0bf")
    assert pack("f", (-0.5,)) == bytes.fromhex("000000bf")
    assert pack("B", (True, False)) == b"\x01\x00"
    assert unpack("B", b"\x01\x00") == (True, False)
    assert unpack("f", pack("f", (1 / 3,))) == (0.3333333432674408,)


@given(st.lists(st.floats(allow_nan=False)))
def test_log_probabilities_lose_no_bit(values: list[float]) -> None:
    back = unpack("d", pack("d", values))
    assert list(back) == values
    assert [math.copysign(1, x) for x in back] == [math.copysign(1, x) for x in values]


def test_a_token_id_that_is_no_int32_is_refused_rather_than_wrapped() -> None:
    with pytest.raises(OverflowError):
        pack("i", (2**31,))


def test_a_word_that_is_no_member_is_refused() -> None:
    column = Word(LedgerState)
    assert column.process_bind_param(LedgerState.JUDGED, DIALECT) == "judged"
    assert column.process_result_value("judged", DIALECT) is LedgerState.JUDGED
    with pytest.raises(ValueError, match="trane"):
        column.process_bind_param("trane", DIALECT)
