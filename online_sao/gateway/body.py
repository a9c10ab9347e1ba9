"""A request's bytes to a JSON object, and a model's complaints to one clear message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from online_sao.gateway.problems import ApiError, joined

M = TypeVar("M", bound=BaseModel)

_MAX_NAME_CHARS = 64
_CODES = {"missing": "missing_field", "extra_forbidden": "unsupported_parameter"}
_OWN_CODES = ("unsupported_content", "conflicting_parameters", "invalid_value")
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object a request carries.

    Raises ApiError 400: `invalid_json` (also NaN, bad UTF-8, nesting beyond reason),
    `invalid_unicode` (a lone surrogate, which no database and no peer could take).
    """
    raw = await request.body()
    try:
        text = raw.decode("utf-8")
        document = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError(400, "invalid_json", "The body is nested too deeply.") from None
    except ValueError:
        raise ApiError(400, "invalid_json", "The body is not valid JSON in UTF-8.") from None
    if not isinstance(document, dict):
        raise ApiError(400, "invalid_json", "The body must be a JSON object.")
    if "\\ud" in text or "\\uD" in text:
        _refuse_lone_surrogates(document)
    return document


def checked(model: type[M], document: dict[str, Any]) -> M:
    """`document` as a `model`. Raises ApiError 400 with at most ten problems."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = problems[0]
        raise ApiError(
            400,
            _CODES.get(first["type"], first["type"] if first["type"] in _OWN_CODES else "")
            or "invalid_value",
            joined([_words(problem) for problem in problems]),
            param=dotted(first["loc"]),
        ) from None


def dotted(location: Sequence[str | int]) -> str:
    """A field's place as clients write it: `messages[0].content`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += ("." if path else "") + printable(part)
    return path


def printable(name: str) -> str:
    """A name from the input, short and without anything a terminal or page might obey."""
    clean = "".join(c if c.isascii() and c.isprintable() and c not in "<>&`" else "?" for c in name)
    return clean[:_MAX_NAME_CHARS]


def _words(problem: Any) -> str:
    """One problem in words. Of the input only a number out of range is repeated."""
    name, kind, value = dotted(problem["loc"]), problem["type"], problem["input"]
    if kind == "missing":
        return f"`{name}` is missing"
    if kind == "extra_forbidden":
        return f"`{name}` is not a parameter of this endpoint"
    if kind in _BOUNDS and isinstance(value, int | float):
        shown = str(value) if abs(value) < 1e18 else f"{float(value):.3g}"
        return f"`{name}` is {shown}; it {problem['msg'].removeprefix('Input ')}"
    return f"`{name}`: {problem['msg']}"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse_lone_surrogates(document: dict[str, Any]) -> None:
    """Raise ApiError 400 naming the first field whose text cannot be encoded."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                waiting += [((*place, key), inner), (place, key)]
        elif isinstance(value, list):
            waiting += [((*place, i), inner) for i, inner in enumerate(value)]
        elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            raise ApiError(
                400,
                "invalid_unicode",
                "A text holds half of a surrogate pair, which is no character.",
                param=dotted(place) or None,
            )
