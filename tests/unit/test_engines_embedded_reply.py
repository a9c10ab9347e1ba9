"""One reply's bookkeeping: ids, text, spans, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from online_sao.engines.embedded.reply import Draw, Reply
from online_sao.types import Sampling, VersionSpan

EOS = 0


class Letters:
    """Token 1 is `a`, 2 is `b`, ...; 0 ends."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(96 + i) for i in ids)

    def token(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        return chr(96 + token_id), (96 + token_id,)


def reply(sampling: Sampling | None = None, **more: Any) -> Reply:
    fields: dict[str, Any] = {
        "request_id": "r", "prompt_ids": (7, 8), "sampling": sampling or Sampling(),
        "max_tokens": 9, "eos_ids": frozenset({EOS}), "vocabulary": Letters(),
        "sink": lambda _: None,
    }  # fmt: skip
    return Reply(**(fields | more))


def test_spans_follow_the_version_of_each_token() -> None:
    one = reply()
    for token, version in ((1, 4), (2, 4), (3, 5), (EOS, 5)):
        last = one.take(Draw(token, -0.5), version)
    assert last.version_spans == (VersionSpan(4, 0, 2), VersionSpan(5, 2, 4))
    assert (last.finish_reason, last.completion_tokens, last.text) == ("stop", 4, "")
    assert one.ids == [7, 8, 1, 2, 3, EOS]


def test_the_end_token_has_no_text_but_an_id_and_a_logprob() -> None:
    last = reply().take(Draw(EOS, -0.25), 0)
    assert (last.text, last.token_ids, last.logprobs) == ("", (EOS,), (-0.25,))


def test_a_stop_string_ends_the_text_before_it_and_keeps_its_tokens() -> None:
    one = reply(Sampling(stop=("bc",)))
    texts = [one.take(Draw(t, -1.0), 0).text for t in (1, 2, 3)]
    assert (texts, one.finish_reason, one.reply_ids) == (["a", "", ""], "stop", [1, 2, 3])


def test_a_stop_string_before_min_tokens_is_text() -> None:
    one = reply(Sampling(stop=("a",), min_tokens=3))
    assert [one.take(Draw(t, -1.0), 0).text for t in (1, 2)] == ["a", "b"]
    assert one.take(Draw(1, -1.0), 0).text == ""
    assert one.finish_reason == "stop"


def test_what_was_held_for_a_stop_string_comes_with_the_last_token() -> None:
    one = reply(Sampling(stop=("bz",)), max_tokens=2)
    assert one.take(Draw(1, -1.0), 0).text == "a"
    last = one.take(Draw(2, -1.0), 0)
    assert (last.text, last.finish_reason) == ("b", "length")


def test_an_aborted_reply_says_so_with_the_spans_it_had() -> None:
    one = reply()
    one.take(Draw(1, -1.0), 3)
    last = one.abort()
    assert (last.finish_reason, last.token_ids, last.completion_tokens) == ("abort", (), 1)
    assert last.version_spans == (VersionSpan(3, 0, 1),)


def test_alternatives_are_named() -> None:
    chunk = reply().take(Draw(1, -0.1, ((1, -0.1), (2, -3.0))), 0)
    assert [(t.token, t.logprob) for t in chunk.tokens[0].top] == [("a", -0.1), ("b", -3.0)]


def test_ignoring_the_end_goes_on_to_max_tokens() -> None:
    one = reply(max_tokens=2, ignore_eos=True)
    assert one.take(Draw(EOS, -1.0), 0).finish_reason is None
    assert one.take(Draw(EOS, -1.0), 0).finish_reason == "length"
