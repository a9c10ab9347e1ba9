"""Records as rows."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from online_sao.store.rows import (
    messages_from_json,
    messages_to_json,
    same_feedback,
    sampling_from_json,
    sampling_to_json,
    why_pruned,
)
from online_sao.types import Feedback, Message, NotTrainable, Outcome, Sampling, utc_now

texts = st.text(max_size=20)
messages = st.builds(
    Message,
    role=texts,
    content=st.none() | texts,
    name=st.none() | texts,
    tool_call_id=st.none() | texts,
    tool_calls=st.lists(st.dictionaries(texts, st.integers() | texts)).map(tuple),
)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 2),
    max_tokens=st.none() | st.integers(1, 100),
    stop=st.lists(texts).map(tuple),
    seed=st.none() | st.integers(),
    logit_bias=st.lists(st.tuples(st.integers(), st.floats(-9, 9))).map(tuple),
    bad_words=st.lists(texts).map(tuple),
    allowed_token_ids=st.lists(st.integers()).map(tuple),
)


@given(st.lists(messages).map(tuple))
def test_messages_survive_json(chat: tuple[Message, ...]) -> None:
    assert messages_from_json(json.loads(json.dumps(messages_to_json(chat)))) == chat


@given(samplings)
def test_sampling_survives_json(sampling: Sampling) -> None:
    assert sampling_from_json(json.loads(json.dumps(sampling_to_json(sampling)))) == sampling


def test_only_what_differs_from_the_defaults_is_written() -> None:
    assert sampling_to_json(Sampling()) == {}
    assert sampling_to_json(Sampling(temperature=0.5, top_p=1.0)) == {"temperature": 0.5}


def test_a_true_is_not_the_number_one_but_4_is_4_0() -> None:
    one = Feedback("fb_1", "r", utc_now(), "thumbs", True)
    assert same_feedback(one, replace(one, id="fb_2"))
    assert not same_feedback(one, replace(one, value=1.0))
    rating = replace(one, value=4.0)
    assert same_feedback(rating, replace(rating, value=4))


def test_what_lost_its_content_is_redacted_unless_it_was_not_trainable_anyway() -> None:
    assert why_pruned(Outcome.COMPLETED, None) is NotTrainable.REDACTED
    assert why_pruned(Outcome.COMPLETED, NotTrainable.GREEDY) is NotTrainable.GREEDY
    assert why_pruned(Outcome.FAILED, None) is None
