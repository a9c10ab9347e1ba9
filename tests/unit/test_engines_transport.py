"""An engine's error answers, named by what they mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from online_sao.engines.transport import refusal, version_number
from online_sao.errors import EngineRefused, EngineUnavailable


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        (400, {"error": {"message": "m", "code": "invalid_json"}}, EngineRefused, "invalid_json"),
        (400, {"error": {"message": "m", "code": 400}}, EngineRefused, "invalid_value"),
        (400, {"error": "exceeds max_model_len 64"}, EngineRefused, "context_length_exceeded"),
        (404, {"detail": "Not Found"}, EngineRefused, "invalid_value"),
        (422, [1], EngineRefused, "invalid_value"),
        (500, {"error": {"message": "m"}}, EngineUnavailable, None),
        (503, None, EngineUnavailable, None),
    ],
)
def test_4xx_is_a_refusal_with_a_word_and_5xx_is_unavailable(
    status: int, body: Any, kind: type[Exception], code: str | None
) -> None:
    error = refusal(status, json.dumps(body).encode())
    assert type(error) is kind
    assert getattr(error, "code", None) == code
    assert str(error)


def test_a_page_of_html_is_not_shown() -> None:
    assert str(refusal(502, b"<html>" + b"x" * 10_000)) == "the engine answered 502"


@pytest.mark.parametrize(
    ("label", "number"),
    [
        ("0", 0),
        ("17", 17),
        ("-1", None),
        ("v3", None),
        ("", None),
        (3, None),
        (None, None),
        ("9" * 30, None),
    ],
)
def test_a_label_is_a_version_only_if_it_is_a_plain_number(label: Any, number: int | None) -> None:
    assert version_number(label) == number
