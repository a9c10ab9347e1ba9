"""Every error of the API in OpenAI's shape, and what each error from below becomes on the wire.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from online_sao.errors import (
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    OnlineSaoError,
    StoreError,
)

RETRY_AFTER_S = 2
"""Seconds a client is told to wait when the engine, the database or a free place is missing."""
MAX_PROBLEMS = 10
MAX_PROBLEM_CHARS = 200

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class ApiError(HTTPException):
    """An answer that is an error: status, message, and OpenAI's `param` and `code`."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code=status, detail=message, headers=headers)
        self.code = code
        self.message = message
        self.param = param

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body, as OpenAI's clients read it."""
        return {
            "error": {
                "message": self.message,
                "type": error_type(self.status_code),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(
            json.dumps(self.body(), ensure_ascii=False).encode("utf-8", "replace"),
            status_code=self.status_code,
            headers=dict(self.headers or {}),
            media_type="application/json",
        )


def error_type(status: int) -> str:
    """OpenAI's `type` of an HTTP status."""
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


def unavailable(code: str, message: str) -> ApiError:
    """503 with `retry-after`."""
    return ApiError(503, code, message, headers={"retry-after": str(RETRY_AFTER_S)})


def joined(problems: Sequence[str]) -> str:
    """At most ten problems of at most 200 characters, as one message."""
    shown = [clipped(problem) for problem in problems[:MAX_PROBLEMS]]
    more = len(problems) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def clipped(text: str) -> str:
    """One problem, at most 200 characters long."""
    return text if len(text) <= MAX_PROBLEM_CHARS else text[: MAX_PROBLEM_CHARS - 3] + "..."


def from_below(error: OnlineSaoError | TimeoutError) -> ApiError:
    """What an engine's or the database's error is to the client.

    Only a refusal's words are passed on: they speak of the client's own request.
    """
    if isinstance(error, EngineRefused):
        return ApiError(400, error.code, clipped(str(error)), param=error.param)
    if isinstance(error, EngineTimeout | TimeoutError):
        return ApiError(
            504,
            "engine_timeout",
            "The engine did not answer in time.",
            headers={"retry-after": str(RETRY_AFTER_S)},
        )
    if isinstance(error, StoreError):
        return unavailable("database_unavailable", "The database cannot be reached; try again.")
    return unavailable("engine_error", "The engine cannot answer at the moment; try again.")


def error_word(error: OnlineSaoError | TimeoutError) -> str:
    """The machine word that the ledger keeps for a request that failed so."""
    if isinstance(error, EngineRefused):
        return error.code
    if isinstance(error, EngineUnavailable):
        return "engine_unavailable"
    return from_below(error).code


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Handler of ApiError, and of the framework's own 404 and 405."""
    if isinstance(error, ApiError):
        return error.response()
    assert isinstance(error, HTTPException)
    status = error.status_code
    code = _HTTP_CODES.get(status, "invalid_request" if status < 500 else "internal_error")
    words = {404: "There is no such path.", 405: "This path does not take this method."}
    message = words.get(status, clipped(str(error.detail)))
    return ApiError(status, code, message, headers=error.headers).response()


async def answer_validation_error(request: Request, error: Exception) -> Response:
    """Handler of the framework's own parameter checks (422 there, 400 here)."""
    assert isinstance(error, RequestValidationError)
    problems = [
        f"`{'.'.join(str(part) for part in problem['loc'][1:])}`: {problem['msg']}"
        for problem in error.errors()
    ]
    return ApiError(400, "invalid_value", joined(problems)).response()


async def answer_store_error(request: Request, error: Exception) -> Response:
    """Handler of a database that cannot be reached."""
    assert isinstance(error, OnlineSaoError)
    return from_below(error).response()


def internal_error() -> ApiError:
    """500, saying nothing of what happened inside."""
    return ApiError(500, "internal_error", "The service failed on this request; it was logged.")
