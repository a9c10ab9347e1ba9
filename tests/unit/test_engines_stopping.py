"""Stop strings in a stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from online_sao.engines.stopping import StopFilter


def shown(stop: list[str], pieces: list[str]) -> tuple[str, bool]:
    filtered = StopFilter(stop)
    text = ""
    for piece in pieces:
        text += filtered.push(piece)
        if filtered.stopped:
            return text, True
    return text + filtered.finish(), False


def test_what_may_begin_a_stop_string_waits_and_comes_when_it_does_not() -> None:
    filtered = StopFilter(["END"])
    assert [filtered.push(p) for p in ("a", "E", "N", "x")] == ["a", "", "", "ENx"]


def test_the_first_stop_string_in_the_text_wins() -> None:
    assert shown(["later", "now"], ["it is now or later"]) == ("it is ", True)


def test_a_stop_string_over_three_pieces_shows_nothing_of_itself() -> None:
    assert shown(["abcabd"], ["xab", "cab", "d!"]) == ("x", True)


def test_an_overlapping_beginning_is_not_lost() -> None:
    assert shown(["aab"], ["a", "a", "a", "b"]) == ("a", True)


def test_unchecked_text_passes_even_when_it_is_a_stop_string() -> None:
    filtered = StopFilter(["no"])
    assert filtered.push("no way", check=False) == "no way"
    assert not filtered.stopped


alphabet = st.text("ab", max_size=12)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(alphabet))
def test_pieces_give_what_the_whole_text_gives(stop: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    found = [whole.find(s) for s in stop if s in whole]
    if not found:
        assert shown(stop, pieces) == (whole, False)
    else:
        text, stopped = shown(stop, pieces)
        assert stopped
        assert whole.startswith(text)
        assert not any(s in text for s in stop)
