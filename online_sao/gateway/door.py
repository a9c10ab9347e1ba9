"""The outermost layer: the request's id, the key, the body's size, and the last catch."""

from __future__ import annotations

import logging
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from online_sao.gateway.auth import Keys
from online_sao.gateway.metrics import Metrics
from online_sao.gateway.problems import ApiError, internal_error

logger = logging.getLogger(__name__)


class Door:
    """ASGI middleware around every request; it adds one call per chunk of a stream."""

    def __init__(self, app: ASGIApp, *, keys: Keys, max_body_bytes: int, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                header = (b"x-request-id", request_id.encode())
                message["headers"] = [*message.get("headers", ()), header]
                self._metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        try:
            self._keys.check(scope)
            await self._app(scope, self._counted(scope, receive), send_named)
        except ApiError as error:
            await error.response()(scope, receive, send_named)
        except Exception:
            # The last boundary: whatever a handler did not foresee must become one logged line
            # and OpenAI's shape. Once the answer has begun there is nothing left to send.
            logger.exception("action=request_failed request_id=%s", request_id)
            if started:
                raise
            await internal_error().response()(scope, receive, send_named)

    def _counted(self, scope: Scope, receive: Receive) -> Receive:
        """`receive`, refusing more than the limit: by the header at once, by count otherwise."""
        limit = self._max_body_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit)
        total = 0

        async def receive_counted() -> Message:
            nonlocal total
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > limit:
                    raise _too_large(limit)
            return message

        return receive_counted


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"The body exceeds {limit} bytes.")
