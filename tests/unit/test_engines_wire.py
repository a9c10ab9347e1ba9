"""JSON on the wire: what is read strictly, and what passes unchanged."""

from __future__ import annotations

import json
import math

import pytest

from online_sao.engines import wire
from online_sao.errors import EngineRefused
from online_sao.types import ReplyChunk, Sampling, TokenText, TopLogprob, VersionSpan

FULL = Sampling(
    temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=9, min_tokens=2, stop=("x", "y"),
    seed=4, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2,
    logit_bias=((3, 1.5), (7, -2.0)), bad_words=("no",), allowed_token_ids=(3, 7), top_logprobs=2,
)  # fmt: skip


@pytest.mark.parametrize("sampling", [Sampling(), FULL])
def test_sampling_comes_back_as_it_was_sent(sampling: Sampling) -> None:
    sent = json.dumps(wire.sampling_to_wire(sampling)).encode()
    assert wire.parse(wire.SamplingBody, sent).to_sampling() == sampling


def test_the_sampled_tokens_own_logprob_is_always_asked_for() -> None:
    assert wire.sampling_to_wire(Sampling())["logprobs"] == 0


@pytest.mark.parametrize(
    ("raw", "param", "code"),
    [
        (b'{"temperature": "hot"}', "temperature", "invalid_value"),
        (b'{"max_tokens": true}', "max_tokens", "invalid_value"),
        (b'{"max_tokens": 1.5}', "max_tokens", "invalid_value"),
        (b'{"temperature": 1e400}', "temperature", "invalid_value"),
        (b'{"temperature": NaN}', "temperature", "invalid_value"),
        (b'{"beam_width": 3}', "beam_width", "unsupported_parameter"),
        (b"[1]", "body", "invalid_value"),
        (b"{", None, "invalid_json"),
        (b"[" * 100_000, None, "invalid_json"),
    ],
)
def test_bad_fields_are_named_and_never_echoed(raw: bytes, param: str | None, code: str) -> None:
    with pytest.raises(EngineRefused) as caught:
        wire.parse(wire.SamplingBody, raw)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert "hot" not in str(caught.value)


def test_a_thousand_bad_fields_give_a_short_answer() -> None:
    raw = json.dumps({f"field{i}": "v" * 500 for i in range(1000)}).encode()
    with pytest.raises(EngineRefused) as caught:
        wire.parse(wire.SamplingBody, raw)
    assert len(str(caught.value)) < wire.MAX_PROBLEMS * (wire.MAX_PROBLEM_CHARS + 2)


def test_nan_and_infinity_pass_the_wire() -> None:
    chunk = ReplyChunk("a", (1, 2), (math.nan, -math.inf), (TokenText("a"), TokenText("b")))
    event = wire.sse(wire.chunk_to_wire("r", chunk, logprobs=True))
    content = json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]["content"]
    assert math.isnan(content[0]["logprob"])
    assert content[1]["logprob"] == -math.inf


def test_spans_are_sent_with_the_last_chunk_alone_and_as_labels() -> None:
    last = ReplyChunk("", (1,), (-1.0,), (), "stop", (VersionSpan(12, 0, 1),), 1)
    choice = wire.chunk_to_wire("r", last, logprobs=False)["choices"][0]
    assert choice["weight_versions"] == [{"version": "12", "start": 0, "end": 1}]
    assert choice["logprobs"] is None
    other = wire.chunk_to_wire("r", ReplyChunk("a", (1,), (-1.0,)), logprobs=True)
    assert "weight_versions" not in other["choices"][0]


def test_a_missing_logprob_is_a_missing_entry_not_a_padded_one() -> None:
    chunk = ReplyChunk("ab", (1, 2), (-1.0,), (TokenText("a"), TokenText("b")))
    assert (
        len(wire.chunk_to_wire("r", chunk, logprobs=True)["choices"][0]["logprobs"]["content"]) == 1
    )


def test_merged_chunks_are_the_whole_of_their_parts() -> None:
    top = (TopLogprob("a", -0.5),)
    first = ReplyChunk("a", (1,), (-1.0,), (TokenText("a", (97,), top),))
    last = ReplyChunk("b", (2,), (-2.0,), (TokenText("b"),), "length", (VersionSpan(0, 0, 2),), 2)
    merged = wire.merge([first, last])
    assert merged == ReplyChunk(
        "ab", (1, 2), (-1.0, -2.0), (*first.tokens, *last.tokens), "length",
        (VersionSpan(0, 0, 2),), 2,
    )  # fmt: skip
    assert wire.merge([first]) is first
